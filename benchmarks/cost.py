"""What the platform costs on AWS per month: sizes of our own fragments and policies, and the prices stated here.

    python benchmarks/cost.py            # the tables of docs/aws.md
    python benchmarks/cost.py --check    # exit code 1 if docs/aws.md has others

Bytes are computed with the code that sends them. Rates of machines are those that our benchmarks measured, on 2 cores,
planned at half; everything else is arithmetic, printed with the tables.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from sparring.experience import Columns, new_id, wire
from sparring.experience.fragment import pack
from sparring.export import onnx
from sparring.games import Box, Discrete, Game
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues, Squashed, param_shapes

PAGE = Path(__file__).parents[1] / "docs" / "aws.md"
MONTH = 730.0  # hours
DAYS = 30.4

# How people play.
STEPS_PER_S = 60  # of a player who plays
HOURS_A_DAY = 1.0
PEAK = 3.0  # the busiest hour beside the average one
FRAGMENT = 100  # steps, the client's default
VERSIONS_PER_H = 1.0  # published: `sparring up --publish-every 3600`
REFRESH = 60.0  # seconds between a client's looks for a newer bot: `Client(refresh=60)`

# Prices in US dollars: us-east-1, on demand, Linux, as listed in mid-2025. Check the current ones.
SHARD_HOUR, PUT_UNITS = 0.015, 0.014 / 1e6  # a put unit is 25 kB of a record
WEEK_HOUR = 0.02  # of a shard that keeps records for more than a day and up to a week, on top
GET, PUT, S3_GB, EGRESS_GB = 0.0004 / 1e3, 0.005 / 1e3, 0.023, 0.09
GP3_GB = 0.08
EKS_HOUR, BALANCER_HOUR = 0.10, 0.0225
SMALL, MIDDLE = ("t3.large", 0.0832), ("m6i.xlarge", 0.192)
NODE, LEARNER, CASSANDRA = ("m6i.large", 0.096), ("c6i.2xlarge", 0.34), ("m6i.xlarge", 0.192)

# What machines do, from docs/benchmarks.md, on 2 cores; then halved. Spark (6 s) and Cassandra (5 s) by the CPU time
# that they took for 96 MB of the path over a stream.
GATEWAY_MB = 145 / 2  # MB/s a gateway process takes in (573,211 steps/s of 44 floats)
GATEWAY_UPLOADS = 1000  # per second: assumed, not measured. Players upload one fragment at a time
SPARK_MB = 32 / 2  # MB/s through Spark on 2 cores
CASSANDRA_MB = 2 * 38 / 2  # MB/s into a node of 4 cores; every copy counts
CASSANDRA_GB = 4000  # of disk a node
COPIES = 3
KEPT = 3  # days of play in the store of a cluster
SHARD_MB, SHARD_RECORDS, FULL = 1.0, 1000, 0.7  # a shard's limits per second, and how full we plan them


@dataclass(frozen=True)
class Measured:
    name: str
    step: float  # bytes on the stream and in the store, per step
    policy: int  # bytes of policy.onnx


def measure(game: Game, head: "QValues | Squashed") -> Measured:
    rng, layers = np.random.default_rng(0), (Dense(256), Dense(256))
    obs = rng.standard_normal((FRAGMENT + 1, *game.observation.element.shape), np.float32)
    action = np.zeros((FRAGMENT, *game.action.element.shape), game.action.element.base)
    reward = np.ones(FRAGMENT, np.float32)
    fragment = pack(
        game,
        Columns(obs, action, reward, np.zeros(FRAGMENT, np.float32)),
        id=new_id(),
        player="player-000001",
        episode=new_id(),
        start=0,
        time=0.0,
        model="bot",
        version=1,
    )
    params = {n: rng.standard_normal(s).astype(np.float32) for n, s in param_shapes(game, layers, head).items()}
    # A record of a stream begins with the game's declaration and holds fragments up to a put unit.
    size, declaration = len(wire.encode([fragment])), len(msgspec.json.encode(game))
    per_record = max(1, (25_000 - declaration) // size)
    return Measured(
        game.name, (size + declaration / per_record) / FRAGMENT, len(onnx.render(Policy(game, layers, head, params)))
    )


GAMES = (
    (Game("CartPole-v1", Box((4,)), Discrete(2), env="CartPole-v1"), QValues()),
    (Game("44-floats", Box((44,)), Box((17,), low=-1.0, high=1.0)), Squashed()),
)


@dataclass(frozen=True)
class Load:
    """Of so many players of one game."""

    players: int
    game: Measured

    @property
    def steps_a_day(self) -> float:
        return self.players * STEPS_PER_S * 3600 * HOURS_A_DAY

    @property
    def peak_steps(self) -> float:
        return max(self.steps_a_day / 86400 * PEAK, min(self.players, 1) * STEPS_PER_S)

    @property
    def peak_mb(self) -> float:
        return self.peak_steps * self.game.step / 1e6

    @property
    def gb_a_day(self) -> float:
        return self.steps_a_day * self.game.step / 1e9

    @property
    def shards(self) -> int:
        records = self.peak_mb * 1e6 / 25_000
        return math.ceil(max(self.peak_mb / SHARD_MB, records / SHARD_RECORDS) / FULL)

    @property
    def downloads_gb(self) -> float:
        """Of bots per month: the version there is when a player begins, and each published while they play."""
        return self.players * DAYS * (1 + VERSIONS_PER_H * HOURS_A_DAY) * self.game.policy / 1e9

    @property
    def polls(self) -> float:
        return self.players * DAYS * HOURS_A_DAY * 3600 / REFRESH


def bucket(load: Load, gateways: int) -> float:
    versions = VERSIONS_PER_H * MONTH
    kept = versions * 2 * load.game.policy / 1e9 * S3_GB  # the ONNX file and the weights
    looks = load.polls + gateways * MONTH * 3600  # a gateway looks every second
    return kept + load.downloads_gb * EGRESS_GB + looks * GET + versions * 6 * PUT


def one_machine(load: Load, machine: tuple[str, float]) -> dict[str, float]:
    return {
        f"1 {machine[0]}: gateway, store, trainer": machine[1] * MONTH,
        f"gp3, {load.gb_a_day * DAYS:,.0f} GB after a month": max(load.gb_a_day * DAYS, 20) * GP3_GB,
        f"S3: bots, {load.downloads_gb:,.1f} GB downloaded": bucket(load, 1),
    }


def cluster(load: Load) -> dict[str, float]:
    uploads = load.peak_steps / FRAGMENT
    gateways = max(2, math.ceil(max(load.peak_mb / GATEWAY_MB, uploads / GATEWAY_UPLOADS)))
    workers = max(1, math.ceil(load.peak_mb / SPARK_MB))
    disk = KEPT * load.gb_a_day * COPIES / FULL
    by_rate, by_disk = load.peak_mb * COPIES / CASSANDRA_MB, disk / CASSANDRA_GB
    nodes = max(3, math.ceil(max(by_rate, by_disk)))
    units = load.gb_a_day * DAYS * 1e9 / 25_000
    entry = (EKS_HOUR + BALANCER_HOUR + gateways * NODE[1]) * MONTH
    return {
        f"Kinesis, {load.shards} shards": load.shards * SHARD_HOUR * MONTH + units * PUT_UNITS,
        "… that keep records for a week": load.shards * WEEK_HOUR * MONTH,
        f"EKS, a load balancer, {gateways} gateways ({NODE[0]})": entry,
        f"Spark, {workers} workers ({NODE[0]})": workers * NODE[1] * MONTH,
        f"Cassandra, {nodes} nodes ({CASSANDRA[0]}; {by_rate:.1f} for the rate)": nodes * CASSANDRA[1] * MONTH,
        f"gp3, {disk:,.0f} GB for {KEPT} days of play in {COPIES} copies": disk * GP3_GB,
        f"1 trainer ({LEARNER[0]})": LEARNER[1] * MONTH,
        f"S3: bots, {load.downloads_gb:,.0f} GB downloaded": bucket(load, gateways),
    }


def bill(load: Load) -> dict[str, float]:
    if load.players <= 100:
        return one_machine(load, SMALL)
    return one_machine(load, MIDDLE) if load.players <= 1000 else cluster(load)


def tables() -> str:
    games = [measure(*game) for game in GAMES]
    lines = ["| game | bytes per step | steps per shard-second | steps per MB of store (one copy) | policy.onnx |"]
    lines += ["|---|---|---|---|---|"]
    for g in games:
        lines.append(
            f"| {g.name} | {g.step:.1f} | {1e6 / g.step:,.0f} | {1e6 / g.step:,.0f} | {g.policy / 1e3:,.0f} kB |"
        )
    lines += ["", "| game | players | steps/s at the peak | MB/s | part | $ per month |", "|---|---|---|---|---|---|"]
    for game in games:
        for players in (10, 1_000, 100_000):
            load = Load(players, game)
            parts = bill(load)
            head = f"| {game.name} | {players:,} | {load.peak_steps:,.0f} | {load.peak_mb:,.2f} "
            for part, dollars in parts.items():
                lines.append(f"{head}| {part} | {dollars:,.0f} |")
                head = "| | | | "
            total = sum(parts.values())
            lines.append(f"| | | | | **together: {total / players:,.3f} per player** | **{total:,.0f}** |")
    return "\n".join([*lines, "", *levers(Load(100_000, games[1]))])


def levers(load: Load) -> list[str]:
    """What moves the bill, in figures of the largest case."""
    day = load.gb_a_day * COPIES / FULL
    often = load.players * DAYS * (1 + 360 * HOURS_A_DAY) * load.game.policy / 1e9
    looks = load.players * DAYS * HOURS_A_DAY * 3600 / 5
    return [
        "What moves it, for 100,000 players of 44 floats:",
        "",
        f"- **How long play is kept.** Nothing is dropped by age yet; {KEPT} days are counted. Each further day is "
        f"{day / 1e3:.0f} TB of disk, ${day * GP3_GB:,.0f} a month and {math.ceil(day / CASSANDRA_GB)} nodes.",
        "- **How long the stream keeps records.** A week, the default, costs "
        f"${load.shards * WEEK_HOUR * MONTH:,.0f} a month more than a day (`--retention 24`, `RetentionHours=24`). "
        "With a day, a job that is away for longer loses play.",
        "- **How often bots are published.** Players download every version that they get while they play. At one "
        f"in 10 s, the most that the default allows, that is {often / 1e3:,.0f} TB a month: "
        f"${often * EGRESS_GB:,.0f} at ${EGRESS_GB} a GB.",
        f"- **How often clients look.** The default of 5 s makes {looks / 1e9:.1f} billion GETs a month, "
        f"${looks * GET:,.0f}; {REFRESH:.0f} s costs ${load.polls * GET:,.0f}.",
        "- **Traffic between zones** ($0.01 a GB each way) and logs are not counted.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with docs/aws.md")
    args = parser.parse_args()
    found = tables()
    if not args.check:
        print(found)
    elif " ".join(found.split()) not in " ".join(PAGE.read_text().split()):  # the page is wrapped
        sys.exit(f"{PAGE} has other tables than these:\n\n{found}")


if __name__ == "__main__":
    main()
