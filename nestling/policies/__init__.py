"""Which policy is worth it: every thinker with every answerer at every thinking budget, accuracy against latency."""
