"""Which replica serves a request: policy, and Serve's request routers."""
