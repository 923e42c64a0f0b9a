"""CfgRouter: the HTTP API of the application."""
