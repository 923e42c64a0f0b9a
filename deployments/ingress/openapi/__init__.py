"""The OpenAPI document of this server, from the fields and answers that it describes."""
