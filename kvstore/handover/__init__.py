"""Hand-over between stores (P/D): what one has in any tier, another fetches into its own slots.

peers.py ties it together; moves.py has the states of a block. NIXL is in `tiers/nixl/`.
"""
