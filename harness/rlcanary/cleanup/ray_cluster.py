"""List a test's actors and placement groups in the connected Ray cluster from Ray's tables, and end them by id.

Ray's public state API needs its dashboard; these functions read the tables (GCS) directly, in about 0.4 ms each.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

Address = tuple[str, int]


class Actor(NamedTuple):
    """A live actor.

    Attributes:
        address: (ip, port) of its worker.
        owner: (ip, port) of the worker that created it.
    """

    id: str
    class_name: str
    name: str
    pid: int
    node: str
    address: Address
    owner: Address

    def __str__(self) -> str:
        name = f" named {self.name!r}" if self.name else ""
        return f"Ray actor {self.class_name}{name} ({self.id[:12]}, process {self.pid})"


def connected() -> bool:
    """Tell if this process has imported Ray and is connected to a cluster."""
    ray = sys.modules.get("ray")
    return ray is not None and hasattr(ray, "is_initialized") and bool(ray.is_initialized())


def actors() -> dict[str, Actor]:
    """List the live actors of this process's job by id. Needs a connection."""
    import ray._private.state
    from ray._private.worker import global_worker

    return {
        actor_id: Actor(
            actor_id,
            info["ActorClassName"],
            info["Name"],
            info["Pid"],
            info["Address"]["NodeID"],
            (info["Address"]["IPAddress"], info["Address"]["Port"]),
            (info["OwnerAddress"]["IPAddress"], info["OwnerAddress"]["Port"]),
        )
        for actor_id, info in ray._private.state.actors(job_id=global_worker.current_job_id).items()
        if info["State"] != "DEAD"
    }


def placement_groups() -> dict[str, str]:
    """List the ids of this process's live placement groups, with their names. Needs a connection."""
    import ray._private.state
    from ray._private.worker import global_worker

    job = global_worker.current_job_id.hex()  # the id of a placement group ends with that of its job
    return {
        group_id: info["name"]
        for group_id, info in ray._private.state.state.placement_group_table().items()
        if info["state"] != "REMOVED" and group_id.endswith(job)
    }


class Holdings(NamedTuple):
    """The ids of actors and placement groups at one moment."""

    actors: frozenset[str] = frozenset()
    placement_groups: frozenset[str] = frozenset()

    def __or__(self, other: Holdings) -> Holdings:
        return Holdings(self.actors | other.actors, self.placement_groups | other.placement_groups)

    def __sub__(self, other: Holdings) -> Holdings:
        return Holdings(self.actors - other.actors, self.placement_groups - other.placement_groups)


NOTHING = Holdings()


def holdings() -> Holdings:
    """List the actors and placement groups in the cluster now; none without a connection."""
    if not connected():
        return NOTHING
    return Holdings(frozenset(actors()), frozenset(placement_groups()))


def handled_actors() -> frozenset[str]:
    """List the ids of actors that this process has a handle of: a new actor is not in a table yet."""
    if not connected():
        return frozenset()
    import gc

    from ray.actor import ActorHandle

    return frozenset(found._actor_id.hex() for found in gc.get_objects() if type(found) is ActorHandle)


def actors_made_since(kept: Holdings) -> list[Actor]:
    """List the actors that are not kept and were not created by a kept actor, directly or through others."""
    now = actors()
    keepers = {actor.address for actor in now.values() if actor.id in kept.actors}
    made = {actor_id: actor for actor_id, actor in now.items() if actor_id not in kept.actors}
    while spared := [actor_id for actor_id, actor in made.items() if actor.owner in keepers]:
        keepers |= {made.pop(actor_id).address for actor_id in spared}
    return list(made.values())


def end_actor(actor: Actor) -> None:
    """End an actor and its restarts. An actor that another one created ends with its owner."""
    import ray
    from ray._private.worker import global_worker
    from ray.exceptions import ActorHandleNotFoundError

    try:
        global_worker.core_worker.kill_actor(ray.ActorID(bytes.fromhex(actor.id)), True)
    except ActorHandleNotFoundError:
        for named in ray.util.list_named_actors(all_namespaces=True):
            if named["name"] == actor.name:
                ray.kill(ray.get_actor(named["name"], named["namespace"]))


def end_made_since(kept: Holdings) -> list[str]:
    """End the actors and placement groups that are not kept, and describe them in words."""
    if not connected():
        return []
    ended = []
    for actor in actors_made_since(kept):
        end_actor(actor)
        ended.append(str(actor))
    names = placement_groups()
    for group_id in names.keys() - kept.placement_groups:
        _remove_placement_group(group_id)
        ended.append(f"Ray placement group {names[group_id] or group_id[:12]}")
    return ended


def _remove_placement_group(group_id: str) -> None:
    import ray
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))


def daemons() -> set[int]:
    """List the process ids of the cluster that this process started: gcs_server, raylet and their companions."""
    worker = sys.modules.get("ray._private.worker")
    node = getattr(worker, "_global_node", None)
    if node is None:
        return set()
    return {info.process.pid for infos in node.all_processes.values() for info in infos}


def log_folder() -> str | None:
    """Return the folder in which the workers of this machine log their output."""
    worker = sys.modules.get("ray._private.worker")
    node: Any = getattr(worker, "_global_node", None)
    return None if node is None else str(node.get_logs_dir_path())
