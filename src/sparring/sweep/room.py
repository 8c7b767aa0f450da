"""What a trial needs of a cluster, and whether there is room for it: CPUs, and the GPUs that trials' learners share."""

import math
from collections import Counter

from sparring.errors import InputError
from sparring.experiment import Experiment
from sparring.search_space import corners
from sparring.sweep.plan import Sweep

__all__ = ["Bundle", "Node", "bundles", "learner_gpus", "require_room"]

Bundle = dict[str, float]  # what is needed on one node
Node = dict[str, float]  # what it has, as Ray counts


def bundles(experiment: Experiment, gpus: float) -> list[Bundle]:
    """What a trial needs: on one node its learner and, unless they are actors of Ray's, its rollout workers."""
    workers, resources = experiment.rollout.workers, experiment.resources
    if experiment.runner == "local":
        return [_bundle(1.0 + workers, gpus)]
    actor = _bundle(resources.actor_cpus, resources.actor_gpus)
    return [_bundle(1.0, gpus), *(actor for _ in range(workers) if actor)]


def _bundle(cpus: float, gpus: float) -> Bundle:
    return {kind: amount for kind, amount in {"CPU": cpus, "GPU": gpus}.items() if amount}


def learner_gpus(sweep: Sweep, nodes: list[Node]) -> float:
    """Of each trial. Left out: where nodes have GPUs, the trials that run at once have equal parts of them."""
    first = sweep.first
    if (asked := first.resources.learner_gpus) is not None:
        return asked
    able = [node for node in nodes if node.get("GPU", 0.0) >= 1]
    if not able or first.resources.actor_gpus:  # who gives actors GPUs divides them himself
        return 0.0
    if first.resources.devices > 1:
        return float(first.resources.devices)
    learner, *actors = bundles(first, 0.0)
    beside = sum(math.floor(node.get("CPU", 0.0) / learner["CPU"]) for node in able)
    all_cpus = sum(node.get("CPU", 0.0) for node in nodes)
    cpus = learner["CPU"] + sum(actor.get("CPU", 0.0) for actor in actors)
    at_once = min(beside, math.floor(all_cpus / cpus), sweep.tune.parallel or sweep.total)
    if at_once < 1:  # only nodes without GPUs have room for a trial
        return 0.0
    sharing = math.ceil(at_once / sum(node["GPU"] for node in able))
    return math.floor(10_000 / sharing) / 10_000  # Ray counts in these; thirds must not make more than a whole


def require_room(sweep: Sweep, nodes: list[Node]) -> None:
    """At once: Tune would wait for ever."""
    gpus = learner_gpus(sweep, nodes)
    for values in corners(sweep.axes):
        experiment = sweep.experiment(values)
        if fits(bundles(experiment, gpus), nodes):
            continue
        has = "; ".join(f"{node.get('CPU', 0.0):g} CPUs, {node.get('GPU', 0.0):g} GPUs" for node in nodes)
        needs = ", ".join(
            f"{count} × {' and '.join(f'{amount:g} {kind}' for kind, amount in bundle)}"
            for bundle, count in Counter(tuple(bundle.items()) for bundle in bundles(experiment, gpus)).items()
        )
        lower = "resources.learner_gpus" if fits(bundles(experiment, 0.0), nodes) else "rollout.workers"
        raise InputError(
            f"a trial does not fit: with its {experiment.rollout.workers} rollout workers it needs {needs}, and this "
            f"cluster of {len(nodes)} nodes has {has}. Lower {lower}, or add nodes with `sparring cluster up --join` "
            "(a Ray of our own: raise resources.cpus)"
        )


def fits(needed: list[Bundle], nodes: list[Node]) -> bool:
    """Each bundle on one node; the largest first, on the first with room."""
    free = [dict(node) for node in nodes]
    for bundle in sorted(needed, key=lambda bundle: -sum(bundle.values())):
        for node in free:
            if all(node.get(kind, 0.0) >= amount - 1e-9 for kind, amount in bundle.items()):
                for kind, amount in bundle.items():
                    node[kind] -= amount
                break
        else:
            return False
    return True
