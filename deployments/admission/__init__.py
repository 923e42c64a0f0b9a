"""The queues in front of the engines: which request has a place, and which one waits."""
