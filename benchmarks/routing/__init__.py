"""Which replica gets a request: policies in a simulation, on real engines, and at scale."""
