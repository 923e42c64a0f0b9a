"""The process that compiles each new grammar on trial. It can be killed."""
