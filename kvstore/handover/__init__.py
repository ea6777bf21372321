"""Hand-over between stores (P/D): what one has in any tier, another fetches into its own slots.

Pure decisions: messages and time in, messages and transfers out. The side channel's socket is in
`kvstore/service/`, NIXL in `tiers/exporter/`.
"""
