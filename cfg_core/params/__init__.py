"""What a request says about guidance.

fields.py has one row for each field; `GuidanceParams` is what a request says, checked;
`ResolvedGuidance` is what admission makes of it.
"""

from cfg_core.params.cuts import Cuts
from cfg_core.params.fields import looks_like_guidance
from cfg_core.params.follower import FollowerParams
from cfg_core.params.guidance import GuidanceParams
from cfg_core.params.resolved import ResolvedFollower, ResolvedGuidance, Scored
from cfg_core.params.rules import Rule
from cfg_core.params.strength import Strength
from cfg_core.params.token_ids import TokenIds

__all__ = [
    "Cuts",
    "FollowerParams",
    "GuidanceParams",
    "ResolvedFollower",
    "ResolvedGuidance",
    "Rule",
    "Scored",
    "Strength",
    "TokenIds",
    "looks_like_guidance",
]
