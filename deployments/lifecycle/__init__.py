"""Signs of life, watchdogs and logs of replica processes."""
