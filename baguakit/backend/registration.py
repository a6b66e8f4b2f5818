"""The registration of the backend with torch."""

from typing import Any

import torch.distributed as dist

from ..arguments import instance
from .group import BaguaGroup
from .policy import Policy

NAME = "bagua"


class _Registered:
    policy = Policy()


def register(policy: Policy | None = None) -> None:
    """Register the backend "bagua" with torch, for `init_process_group("bagua")` and the groups that are made then.

        bk.backend.register()
        torch.distributed.init_process_group("bagua")

    All ranks call it with the same policy, before they make the group: rank 0 prints it. A further call sets the policy
    of groups that are made later.

    Args:
        policy: which collectives fly compressed; None for `Policy()`.

    Raises:
        TypeError: `policy` is not a Policy.
    """
    _Registered.policy = Policy() if policy is None else instance("policy", policy, Policy, "a bk.backend.Policy")
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _made, extended_api=True, devices=["cpu", "cuda"])


def _made(options: Any, unused: Any) -> BaguaGroup:
    return BaguaGroup(options, _Registered.policy)
