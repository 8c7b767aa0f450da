"""What deploy/ holds: checked by those who know the formats, applied to the AWS API on this machine as far as it goes,
started where nothing but a process is needed."""

import base64
import contextlib
import fnmatch
import json
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
import typer
import urllib3
import yaml
from aws_server import aws_server

from sparring.aws import s3
from sparring.cli import entry as cli
from sparring.cli.streams import WEEK
from sparring.games import Box, Discrete, Game
from sparring.networks.policy import Policy
from sparring.networks.spec import Dense, QValues
from sparring.registry.registry import Registry
from sparring.stream.ingest import ALARM

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "deploy" / "aws.yaml"
MANIFESTS = sorted(p for p in (ROOT / "deploy" / "kubernetes").glob("*.yaml") if p.name != "kustomization.yaml")
DOCKERFILES = sorted((ROOT / "deploy").glob("*.Dockerfile"))
GAME = Game("CartPole-v1", Box((4,)), Discrete(2), env="CartPole-v1")
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}


class Template(yaml.SafeLoader):
    """CloudFormation's short forms, as what they are short for."""


Template.add_multi_constructor(
    "!",
    lambda loader, tag, node: {
        tag: loader.construct_sequence(node, deep=True)
        if isinstance(node, yaml.SequenceNode)
        else loader.construct_scalar(node)
    },
)


def template() -> Any:
    return yaml.load(TEMPLATE.read_text(), Template)  # a SafeLoader


def resources() -> list[Any]:
    return [r for path in MANIFESTS for r in yaml.safe_load_all(path.read_text())]


# CloudFormation


def test_the_template_is_without_fault() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "cfn-lint", TEMPLATE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def aws() -> Iterator[str]:
    with aws_server() as url, pytest.MonkeyPatch.context() as patch:
        for name, value in {**KEYS, "AWS_DEFAULT_REGION": "eu-west-1"}.items():
            patch.setenv(name, value)
        yield url


def applied(aws: str, name: str, update: bool = False, **parameters: str) -> dict[str, str]:
    """The stack's outputs."""
    stacks = boto3.client("cloudformation", endpoint_url=aws)
    make = stacks.update_stack if update else stacks.create_stack
    given = [{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()]
    make(StackName=name, TemplateBody=TEMPLATE.read_text(), Parameters=given, Capabilities=["CAPABILITY_IAM"])
    found = stacks.describe_stacks(StackName=name)["Stacks"][0]
    assert found["StackStatus"] == ("UPDATE_COMPLETE" if update else "CREATE_COMPLETE")
    return {output["OutputKey"]: output["OutputValue"] for output in found["Outputs"]}


def test_the_small_size(aws: str, random_policy: Callable[..., Policy]) -> None:
    """First the bucket, then, when the wheel is in it, the machine."""
    out = applied(aws, "small")
    assert set(out) == {"Bucket", "Registry", "PublicRegistry"}
    policy = random_policy(GAME, (Dense(8),), QValues())
    registry = Registry(f"{out['Registry']}&endpoint={aws}")  # the address as the stack gives it
    registry.check()
    assert registry.publish(policy, algorithm="dqn").version == 1
    assert out["PublicRegistry"] == s3.S3Bucket.parse(out["Registry"]).public_url

    out = applied(aws, "small", update=True, Machine="yes")
    ec2 = boto3.client("ec2", endpoint_url=aws)
    machine = ec2.describe_instances(InstanceIds=[out["Instance"]])["Reservations"][0]["Instances"][0]
    assert machine["InstanceType"] == "t3.large"
    encoded = ec2.describe_instance_attribute(InstanceId=out["Instance"], Attribute="userData")["UserData"]["Value"]
    script = base64.b64decode(encoded).decode()
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert f"s3://{out['Bucket']}/dist/sparring-0.1.0-py3-none-any.whl" in script
    command = re.search(r"^ExecStart=(.*)$", script, re.MULTILINE)
    assert command is not None
    words = shlex.split(command[1])
    assert not unknown(words)
    assert out["Registry"] in words
    assert "--allowed-host" not in words

    out = applied(aws, "named", Machine="yes", HostName="play.example.org")
    encoded = ec2.describe_instance_attribute(InstanceId=out["Instance"], Attribute="userData")["UserData"]["Value"]
    assert "--publish-every 3600 --allowed-host play.example.org\n" in base64.b64decode(encoded).decode()


def test_nobody_reaches_a_machine_unless_it_is_said_who() -> None:
    """The AWS API server leaves a stack's security groups empty: this is read in the template."""
    parts = template()["Resources"]
    rule = {"IpProtocol": "tcp", "FromPort": 8400, "ToPort": 8400, "CidrIp": {"Ref": "PlayersCidr"}}
    assert parts["MachineAccess"]["Properties"]["SecurityGroupIngress"] == {"If": ["WithPlayers", [rule], []]}
    assert template()["Parameters"]["PlayersCidr"]["Default"] == ""
    machine = parts["Instance"]["Properties"]
    assert machine["SecurityGroupIds"] == [{"GetAtt": "MachineAccess.GroupId"}]
    assert machine["MetadataOptions"] == {"HttpTokens": "required"}


@pytest.fixture(scope="module")
def large(aws: str) -> dict[str, str]:
    return applied(aws, "large", Shards="2", Machine="yes")


def test_the_stream(aws: str, large: dict[str, str]) -> None:
    name = large["StreamAddress"].removeprefix("kinesis://").partition("?")[0]
    kinesis = boto3.client("kinesis", endpoint_url=aws)
    summary = kinesis.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]
    assert summary["OpenShardCount"] == 2
    assert template()["Resources"]["Stream"]["Properties"]["RetentionPeriodHours"] == {"Ref": "RetentionHours"}
    assert template()["Parameters"]["RetentionHours"]["Default"] == WEEK  # as `sparring stream create` makes it


def test_somebody_hears_of_a_job_that_does_not_read() -> None:
    """The AWS API server leaves a stack's alarms out: this is read in the template."""
    alarm = template()["Resources"]["StreamAlarm"]["Properties"]
    age, share = alarm["Metrics"]
    assert age["MetricStat"]["Metric"]["MetricName"] == "GetRecords.IteratorAgeMilliseconds"
    assert age["MetricStat"]["Metric"]["Dimensions"] == [{"Name": "StreamName", "Value": {"Ref": "Stream"}}]
    assert share["Expression"] == {"Sub": "age / 3600000 / ${RetentionHours}"}
    assert alarm["Threshold"] == ALARM  # as the job itself warns
    assert alarm["TreatMissingData"] == "breaching"


READ = {"s3:ListBucket {bucket}", "s3:GetObject {bucket}/bots/games/x"}
SHARDS = {"kinesis:ListShards {stream}", "kinesis:DescribeStreamSummary {stream}"}
MAY = {
    "GatewayRole": READ
    | SHARDS
    | {"kinesis:PutRecords {stream}", "s3:PutObject {bucket}/bots/games/x", "s3:DeleteObject {bucket}/bots/games/x"},
    "IngestRole": SHARDS | {"kinesis:GetRecords {stream}", "kinesis:GetShardIterator {stream}"},
    "TrainerRole": READ | {"s3:PutObject {bucket}/bots/games/x", "s3:DeleteObject {bucket}/bots/games/x"},
}
OTHERS = {
    "s3:PutObject {bucket}/dist/x",
    "s3:GetObject {bucket}/dist/x",
    "s3:PutObject {bucket}/bots/x",
    "s3:DeleteObject {bucket}/bots/x",
    "s3:PutBucketPolicy {bucket}",
    "s3:ListBucket {bucket}-2",
    "kinesis:DeleteStream {stream}",
    "kinesis:PutRecords {stream}-2",
}


@pytest.mark.parametrize("role", MAY)
def test_a_role_may_do_its_work_and_nothing_else(aws: str, large: dict[str, str], role: str) -> None:
    iam, name = boto3.client("iam", endpoint_url=aws), large[role].rpartition("/")[2]
    given = [
        statement
        for policy in iam.list_role_policies(RoleName=name)["PolicyNames"]
        # It hands a stack's documents out as Python prints them, which YAML reads as well.
        for statement in yaml.safe_load(iam.get_role_policy(RoleName=name, PolicyName=policy)["PolicyDocument"])[
            "Statement"
        ]
    ]
    stream = large["StreamAddress"].removeprefix("kinesis://").partition("?")[0]
    names = {
        "bucket": f"arn:aws:s3:::{large['Bucket']}",
        "stream": f"arn:aws:kinesis:eu-west-1:123456789012:stream/{stream}",
    }

    def allowed(request: str) -> bool:
        action, resource = request.format(**names).split()
        return any(action in s["Action"] and fnmatch.fnmatchcase(resource, s["Resource"]) for s in given)

    every = set().union(*MAY.values()) | OTHERS
    assert {request for request in every if allowed(request)} == MAY[role]
    assert all(s["Effect"] == "Allow" and "*" not in "".join(s["Action"]) and s["Resource"] != "*" for s in given)


def test_the_bucket_is_as_open_as_registry_init_makes_it() -> None:
    """The AWS API server ignores policies and blocks of a stack's buckets: compared with what was tested on S3."""
    bucket = template()["Resources"]["Bucket"]["Properties"]
    assert bucket["PublicAccessBlockConfiguration"] == s3.BLOCK
    ours = s3.S3Bucket("name", "bots", "eu-west-1").statement()
    (statement,) = template()["Resources"]["BucketPolicy"]["Properties"]["PolicyDocument"]["Statement"]
    assert statement["Resource"] == {"Sub": "${Bucket.Arn}/${Prefix}/games/*"}
    assert ours["Resource"] == "arn:aws:s3:::name/bots/games/*"
    assert {k: v for k, v in statement.items() if k not in ("Sid", "Resource")} == {
        k: v for k, v in ours.items() if k not in ("Sid", "Resource")
    }
    (rule,) = bucket["CorsConfiguration"]["CorsRules"]
    for name, values in (("AllowedMethod", rule["AllowedMethods"]), ("AllowedOrigin", rule["AllowedOrigins"])):
        assert re.findall(f"<{name}>(.*?)</{name}>", s3.CORS.decode()) == values


# Kubernetes


def test_the_manifests_are_without_fault() -> None:
    words = [Path(sys.executable).parent / "kubernetes-validate", "--strict", "--quiet", *MANIFESTS]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kustomization = yaml.safe_load((ROOT / "deploy/kubernetes/kustomization.yaml").read_text())
    assert sorted(kustomization["resources"]) == [path.name for path in MANIFESTS]


def pods() -> Iterator[tuple[str, Any]]:
    for resource in resources():
        if "template" in (resource.get("spec") or {}):
            yield resource["metadata"]["name"], resource["spec"]["template"]


def test_no_pod_has_rights_it_does_not_need() -> None:
    assert {name for name, _ in pods()} == {"cassandra", "store-init", "gateway", "ingest", "trainer"}
    for name, pod in pods():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["runAsUser"] >= 999, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context.get("readOnlyRootFilesystem", False) == (name != "cassandra"), name
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]
            for value in [v for env in container.get("env", []) for v in env.values()]:
                assert not re.search("secret|password|AKIA", value, re.IGNORECASE)


def test_names_fit_together() -> None:
    """Images have Dockerfiles, accounts exist, variables are in the map, whoever uses the store may reach it."""
    accounts = {r["metadata"]["name"] for r in resources() if r["kind"] == "ServiceAccount"}
    (config,) = [r["data"] for r in resources() if r["kind"] == "ConfigMap"]
    built = {f"sparring-{path.name.partition('.')[0]}" for path in DOCKERFILES}
    for name, pod in pods():
        for container in pod["spec"]["containers"]:
            assert container["image"] in built | {"cassandra:5.0"}
            words = [*container.get("command", []), *container.get("args", [])]
            used = set(re.findall(r"\$\((\w+)\)", " ".join(words)))
            assert used <= set(config)
            assert ("STORE" in used) == (pod["metadata"]["labels"].get("store") == "reader-or-writer"), name
        assert pod["spec"].get("serviceAccountName", "gateway") in accounts


def hosts() -> str:
    (config,) = [r["data"] for r in resources() if r["kind"] == "ConfigMap"]
    return str(config["HOST"])


# Images


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_installs_what_there_is(path: Path) -> None:
    text = path.read_text()
    extras = re.search(r'"/src\[([\w,]+)\]"', text)
    assert extras is not None
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras[1].split(",")) <= set(known)
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in source.split())
    assert re.search(r"^USER 10001$", text, re.MULTILINE)
    if "spark" in extras[1]:
        return  # half a gigabyte of source, only to be looked at; `make lock` resolves it
    words = [sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--quiet", "--python", sys.executable]
    words += ["-c", str(ROOT / "requirements/dev.txt"), f"{ROOT}[{extras[1]}]"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_gateway_needs_no_learning_stack(tmp_path: Path) -> None:
    """What gateway.Dockerfile makes, without an image: the same packages, the same command."""
    place, uv = tmp_path / "app", [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, place], check=True)
    install = [*uv, "pip", "install", "--quiet", "--python", place / "bin/python"]
    subprocess.run([*install, "-c", ROOT / "requirements/dev.txt", f"{ROOT}[gateway]"], check=True)
    code = "import importlib.util as u; print([m for m in ('jax', 'optax', 'ray', 'pytest') if u.find_spec(m)])"
    assert (
        subprocess.run([place / "bin/python", "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    )
    words = [place / "bin/sparring", "up", "--no-train", "--data", tmp_path / "data", "--port", "0", "--print-address"]
    (pod,) = [pod for name, pod in pods() if name == "gateway"]
    args = [arg.replace("$(HOST)", hosts()) for arg in pod["spec"]["containers"][0]["args"]]
    words += args[args.index("--allowed-host") :]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as gateway, contextlib.ExitStack() as stack:
        stack.callback(gateway.send_signal, signal.SIGTERM)
        assert gateway.stdout is not None
        url = gateway.stdout.readline().strip()
        for host, status in (  # as probes, players in the cluster and a load balancer's clients ask; and a stranger
            (urlsplit(url).netloc, 200),
            ("10.0.7.9:8400", 200),
            ("gateway", 200),
            ("gateway.sparring.svc.cluster.local", 200),
            ("internal-a1-2.us-east-1.elb.amazonaws.com", 200),
            ("evil.example", 403),
        ):
            assert urllib3.request("GET", f"{url}/healthz", headers={"host": host}, timeout=10).status == status, host
    assert gateway.returncode == 0


# Commands


def unknown(words: list[str]) -> list[str]:
    """Of a command line: the command or the options that there are not."""
    command: Any = typer.main.get_command(cli.app)
    rest = [word for word in words[1:] if word]
    while hasattr(command, "commands") and rest:
        found = command.commands.get(rest[0])
        if found is None:
            return [rest[0]]
        command, rest = found, rest[1:]
    options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    return [word for word in rest if word.startswith("--") and word.partition("=")[0] not in options]


def test_every_command_of_the_images_exists() -> None:
    wrong = {}
    for path in DOCKERFILES:
        entry = json.loads(path.read_text().rpartition("ENTRYPOINT ")[2])
        image = f"sparring-{path.name.partition('.')[0]}"
        for name, pod in pods():
            for container in pod["spec"]["containers"]:
                if container["image"] == image:
                    words = container.get("command", entry) + container.get("args", [])
                    if missing := unknown(words):
                        wrong[name] = missing
    assert wrong == {}


def test_every_command_of_the_page_exists() -> None:
    page = (ROOT / "docs/aws.md").read_text()
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    lines = [line for line in blocks.splitlines() if line.startswith("sparring ")]
    assert lines
    assert {line: unknown(shlex.split(line, comments=True)) for line in lines} == {line: [] for line in lines}


def test_the_costs_are_what_the_code_computes() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/cost.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
