"""First-order mutants of the code behind an adapter, and the checks that kill them."""
