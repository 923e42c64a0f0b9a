"""The application over HTTP: what its way costs, what it carries, how long it takes to start."""
