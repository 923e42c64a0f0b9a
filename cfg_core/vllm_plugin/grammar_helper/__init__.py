"""The process that compiles each new grammar on trial, and can be killed."""
