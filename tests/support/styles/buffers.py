"""Three buffers that are correct by construction, each in its own hand: a queue, a stack and a pool by version."""

import json
import random
from collections import deque

import numpy as np

from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.records.buffering import Taken


def oldest(group):
    return min(min(each.token_versions or [group.policy_version]) for each in group.completions)


class Queue:
    """First in, first out. Groups are judged as they come out; what is fresh and too few goes back to the front.

    The count of accepted groups bounds the sampler, as in AReaL.
    """

    class _State:
        def __init__(self, settings):
            self.settings, self.groups = settings, deque()
            # The updates before the start had their groups, too.
            self.accepted = settings.first_version * settings.groups_per_batch

    def new_buffer(self, settings):
        if settings.dynamic_sampling:
            raise NotProvided("groups are filtered before they are put")
        return self._State(settings)

    def put_groups(self, buffer, groups):
        room = len(groups) if buffer.settings.capacity is None else buffer.settings.capacity - len(buffer.groups)
        accepted = groups[:room]
        buffer.groups.extend(accepted)
        buffer.accepted += len(accepted)
        return len(accepted)

    def take_groups(self, buffer, trainer_version):
        wanted, batch = buffer.settings.groups_per_batch, []
        while buffer.groups and len(batch) < wanted:
            group = buffer.groups.popleft()
            if trainer_version - oldest(group) <= buffer.settings.max_staleness:
                batch.append(group)
        if len(batch) < wanted:
            buffer.groups.extendleft(reversed(batch))
            batch = []
        return Taken(batch)

    def groups_to_start(self, buffer, trainer_version, running):
        updates = trainer_version + buffer.settings.max_staleness + 1
        return max(0, updates * buffer.settings.groups_per_batch - buffer.accepted - running)

    def save_buffer(self, buffer, folder):
        """As JSON, which knows no tuples."""
        rows = [
            {**vars(group), "completions": [vars(completion) for completion in group.completions]}
            for group in buffer.groups
        ]
        (folder / "queue.json").write_text(json.dumps([buffer.accepted, rows]))

    def load_buffer(self, settings, folder):
        buffer = self.new_buffer(settings)
        buffer.accepted, rows = json.loads((folder / "queue.json").read_text())
        for row in rows:
            completions = [Completion(**completion) for completion in row.pop("completions")]
            buffer.groups.append(Group(completions=completions, **row))
        return buffer

    def rollout_seed(self, seed, rank, step, request):
        return int(np.random.SeedSequence(seed, spawn_key=(rank, step, request)).generate_state(1)[0])


class Stack:
    """Last in, first out, of rows: a group is put together again when it is taken. One version per group is kept."""

    def new_buffer(self, settings):
        if settings.capacity is not None:
            raise NotProvided("memory is the only bound")
        return {"settings": settings, "rows": {}, "next": 0}

    def put_groups(self, buffer, groups):
        for group in groups:
            labels = {v for each in group.completions for v in each.token_versions or [group.policy_version]}
            if len(labels) > 1:
                raise NotProvided("one version per group")
            if buffer["settings"].dynamic_sampling and len(set(group.rewards)) == 1:
                continue
            references = group.ref_logprobs or [None] * len(group.rewards)
            rows = list(zip(group.completions, group.rewards, references, strict=True))
            # Long completions first; the rows stay together with all that is theirs.
            rows.sort(key=lambda row: -len(row[0].token_ids))
            buffer["rows"][buffer["next"]] = (tuple(group.prompt_ids), group.item_id, oldest(group), rows)
            buffer["next"] += 1
        return len(groups)

    def take_groups(self, buffer, trainer_version):
        stale = [
            key
            for key, (_, _, version, _) in buffer["rows"].items()
            if version + buffer["settings"].max_staleness < trainer_version
        ]
        thrown = [self._group(buffer["rows"].pop(key)) for key in stale]
        wanted = buffer["settings"].groups_per_batch
        if len(buffer["rows"]) < wanted:
            return Taken([], thrown)
        return Taken([self._group(buffer["rows"].popitem()[1]) for _ in range(wanted)], thrown)

    @staticmethod
    def _group(entry):
        prompt, item, version, rows = entry
        completions, rewards, references = zip(*rows, strict=True)
        references = None if references[0] is None else references
        return Group(prompt, completions, rewards, references, item_id=item, policy_version=version)

    def rollout_seed(self, seed, rank, step, request):
        """Blocks of a million requests, a thousand ranks of them for each step."""
        return ((seed * 10_007 + step) * 1_000 + rank) * 1_000_000 + request


class Pool:
    """Groups in no order, drawn at random; a full pool throws out the one that came first."""

    def new_buffer(self, settings):
        return {"settings": settings, "groups": [], "random": random.Random(0)}

    def put_groups(self, buffer, groups):
        settings = buffer["settings"]
        informative = [
            each for each in groups if max(each.rewards) > min(each.rewards) or not settings.dynamic_sampling
        ]
        buffer["groups"] += informative
        if settings.capacity is not None:
            del buffer["groups"][: -settings.capacity]
        return len(groups)

    def take_groups(self, buffer, trainer_version):
        settings = buffer["settings"]
        limit = trainer_version - settings.max_staleness
        stale = [group for group in buffer["groups"] if oldest(group) < limit]
        buffer["groups"] = [group for group in buffer["groups"] if oldest(group) >= limit]
        if len(buffer["groups"]) < settings.groups_per_batch:
            return Taken((), stale)
        places = buffer["random"].sample(range(len(buffer["groups"])), settings.groups_per_batch)
        return Taken(tuple(buffer["groups"].pop(place) for place in sorted(places, reverse=True)), stale)
