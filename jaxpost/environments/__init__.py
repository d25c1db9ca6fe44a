"""Multi-turn episodes: environments with tools in processes of their own, and agents that reach the policy over HTTP.

`factory` makes the pool and the sampler of a stage. `episodes.Episodes`, with `episode` and `episode_scheduler`, plays
conversations with tools; `pool` and `worker` are the two sides of an environment's process; `tool_schema` and `turns`
translate between Python methods, chat messages and tokens. `agents.Agents` lets an external agent play, through
`openai_server`, with `openai_format`, `openai_stream`, `http_connections` and `shared_engines`. `examples` has two
environments to start from.

stage/, tools/ and launch/ import `factory` and `openai_server`; both samplers stand in for `rollout.sampler.Sampler`.
This room may import rollout/, data/, rewards/, workers/ and everything below them. Training, losses and advantages do
not belong here.
"""
