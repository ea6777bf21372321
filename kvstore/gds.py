"""What `kvstore check` found out about NIXL's GDS plugin; tiers/nvme/gds.py does."""

from __future__ import annotations

import msgspec

UNUSED = (
    "kvstore does not use it: what is on disk always goes through host memory, where checksums are"
    " compared before an engine gets it"
)


class Gds(msgspec.Struct, frozen=True):
    """Whether NIXL's GDS plugin could move blocks between this disk and a GPU.

    usable: it loads, and there is a GPU. direct: the bytes would not pass host memory, either.
    reasons: what stands in the way of the two.
    """

    usable: bool
    direct: bool
    reasons: list[str]

    @property
    def text(self) -> str:
        """Return it as a sentence."""
        if self.direct:
            found = "could be used"
        elif self.usable:
            found = f"would go through host memory: {'; '.join(self.reasons)}"
        else:
            found = f"cannot be used: {'; '.join(self.reasons)}"
        return f"{found}. {UNUSED}"
