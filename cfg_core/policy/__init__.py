"""The rules of scheduling, without an engine: no torch, no vLLM, no clock.

- lockstep: which streams run in a step, and which of them sample.
- groups: streams, groups, and the table of them.
- draft_length: how many drafts the groups get under speculation.
- draft_cost: what one more draft costs; step_times: the steps in flight.
- media_budget: which images, audio and video the streams of a step can reach.
- pool: how leaders and followers share the KV blocks.

`cfg_core/vllm_plugin/core/` carries them out in vLLM's scheduler.
"""
