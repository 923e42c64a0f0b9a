"""What runs in vLLM's workers: one process for each device.

worker.py picks the worker of the platform. It makes the runner, v1.py or v2.py, whichever vLLM
uses. In a step with groups, both stage where the rows are (staging), blend them before the model's
head (head) or after it (rows), sample without the followers' rows where they can (compact_v1,
compact_v2), and copy the leaders' tokens. Drafters, logits processors and scores follow the same
rows.
"""
