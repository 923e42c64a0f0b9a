"""What every HTTP side shares: errors, headers, events, and bounds on clients."""
