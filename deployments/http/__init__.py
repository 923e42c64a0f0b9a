"""Parts that all HTTP code shares: errors, answers, events, and bounds on clients."""
