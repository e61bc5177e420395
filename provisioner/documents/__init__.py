"""The files that the tool reads and writes, as frozen types: recipes, receipts, locks, manifests of bundles. Pure."""
