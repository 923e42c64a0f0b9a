"""The models of this repository, and the programs that make them."""
