"""JSON Schemas of the files that people write: experiments, games and sweeps. Editors complete and check by them."""

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec

from sparring import algorithms
from sparring.experiment import Experiment
from sparring.games import Game
from sparring.games.atari_settings import AtariSettings
from sparring.games.spec import HELP
from sparring.networks.activations import ACTIVATIONS
from sparring.networks.layers import LAYERS, Layer, find_layer
from sparring.search_space import KINDS
from sparring.sweep.plan import SAME, Tune

__all__ = ["KINDS_OF_FILES", "Schema", "experiment", "game", "sweep"]

Schema = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
REF = "#/$defs/{name}"
PARAM = re.compile(r":param (\w+): (.+?)(?=\n:|\n\n|\Z)", re.S)
COMMENT = re.compile(r"^    (\w+): .*?\S  # (.+)$", re.M)
GAME_ID: Schema = {
    "id": {"type": "string", "description": "The game's id."},
    "name": {"type": "string", "description": "What it is called on the platform, if not as its id."},
}
OUTSIDE = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"  # module:Attribute


def game() -> Schema:
    """Of a game's declaration (.json)."""
    schema, defs = _schema(Game)
    defs["Game"]["properties"][HELP] = {"description": "Words and examples for people: nothing reads them."}
    defs["Game"]["additionalProperties"] = False  # in a file that a person writes, an unknown key is a typo
    return {"$schema": DIALECT, "title": "A game of Sparring", **schema, "$defs": defs}


def experiment() -> Schema:
    """Of an experiment's file (.yaml), with the hyperparameters of each of our algorithms."""
    schema, defs = _schema(Experiment)
    rules = []
    for name in algorithms.ALGORITHMS:
        _, found = _schema(config := algorithms.find(name).config_class)
        own = found.pop(config.__name__)
        own["title"] = f"Hyperparameters of {name}"
        own["properties"] = {"name": {"const": name}, **own["properties"]}
        defs |= found | {name: own}
        rules.append({"if": _named({"const": name}), "then": {"$ref": REF.format(name=name)}})
    defs |= _layers()
    atari, found = _schema(AtariSettings)
    found["AtariSettings"]["properties"] |= GAME_ID
    defs |= found
    defs["Experiment"]["properties"]["game"]["anyOf"] = [{"type": "string"}, _set_game(atari)]
    ours = {"enum": list(algorithms.ALGORITHMS)}
    others = {"pattern": OUTSIDE, "type": "string"}, {"pattern": "^rllib/", "type": "string"}
    defs["Experiment"]["properties"]["algorithm"] |= _named({"anyOf": [ours, *others]}) | {"allOf": rules}
    return {"$schema": DIALECT, "title": "An experiment of Sparring", **schema, "$defs": defs}


def _set_game(atari: Schema) -> Schema:
    """A game's id and what it is set to; of Atari's games we know the names."""
    known = {"if": {"properties": {"id": {"pattern": "^ALE/"}}}, "then": atari}
    return {"type": "object", "properties": GAME_ID, "required": ["id"], **known}


def _layers() -> dict[str, Schema]:
    """`Layer`, and what it may be: one of ours, or anybody's."""
    defs: dict[str, Schema] = {}
    other = {"type": "object", "properties": {"layer": {"type": "string", "pattern": OUTSIDE}}, "required": ["layer"]}
    for name in LAYERS:
        schema, more = _schema(find_layer(name))
        defs |= more
        other = {"if": {"properties": {"layer": {"const": name}}, "required": ["layer"]}, "then": schema, "else": other}
    for each in defs.values():
        if "activation" in each["properties"]:
            each["properties"]["activation"] |= {"anyOf": [{"enum": list(ACTIVATIONS)}, {"pattern": OUTSIDE}]}
    return {**defs, "Layer": {"title": "A layer of a network", **other}}


def _named(name: Schema) -> Schema:
    return {"properties": {"name": {"description": "Which algorithm learns.", **name}}, "required": ["name"]}


def sweep() -> Schema:
    """Of a sweep's file (.yaml): an experiment whose values may be searched, and `tune`."""
    schema = experiment()
    schema["title"] = "A sweep of Sparring"
    defs = schema["$defs"]
    for name in defs.keys() - {"Stop", "Resources"}:  # these are the same in all trials
        if "properties" in defs[name]:
            _let_search(defs[name], SAME if name == "Experiment" else {})
    _let_search(defs["Experiment"]["properties"]["algorithm"]["anyOf"][0], {})
    _, more = _schema(Tune)
    defs |= more | {"Searched": _searched()}
    defs["Experiment"]["properties"]["tune"] = {"$ref": REF.format(name="Tune"), "description": "How it is searched."}
    return schema


def _let_search(schema: Schema, same: dict[str, str]) -> None:
    """Each of an object's values may be a searched one; `same` are not."""
    for name, value in schema["properties"].items():
        if name in same or "const" in value or value.get("enum", ()) == [value.get("default")]:
            continue
        about = {key: value.pop(key) for key in ("description", "default") if key in value}
        schema["properties"][name] = {"anyOf": [copy.deepcopy(value), {"$ref": REF.format(name="Searched")}]} | about


def _searched() -> Schema:
    listed = {"type": "array", "minItems": 1}
    numbers = {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "number"}}
    forms = {kind: listed if kind in ("choice", "grid") else numbers for kind in KINDS}
    whole = {"randint": numbers | {"items": {"type": "integer"}}}
    return {
        "title": "A searched value",
        "type": "object",
        "properties": forms | whole,
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }


def _schema(kind: type) -> tuple[Schema, dict[str, Schema]]:
    """msgspec's, with a description of every field."""
    (schema,), defs = msgspec.json.schema_components([kind], ref_template=REF, schema_hook=_hook)
    for struct in _structs(msgspec.inspect.type_info(kind)):
        found = defs[struct.__name__]
        if "description" in found:
            found["description"] = _text(PARAM.sub("", inspect.cleandoc(found["description"])))
        descriptions = _descriptions(struct)
        for field in msgspec.structs.fields(struct):
            if (words := descriptions.get(field.name)) is not None:
                found["properties"][field.encode_name]["description"] = words
    return schema, defs


def _hook(kind: type) -> Schema:
    if kind is Layer:
        return {"$ref": REF.format(name="Layer")}
    raise NotImplementedError


def _structs(info: Any) -> Iterator[type[msgspec.Struct]]:
    """All that a type is made of."""
    if isinstance(info, msgspec.inspect.StructType):
        yield info.cls
    for name in info.__struct_fields__ if isinstance(info, msgspec.Struct) else ():
        inner = getattr(info, name)
        for part in inner if isinstance(inner, tuple) else (inner,):
            if isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field):
                yield from _structs(part)


def _descriptions(kind: type[msgspec.Struct]) -> dict[str, str]:
    """`:param name:` of the docstring, or the comment behind a field."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if not issubclass(each, msgspec.Struct) or each is msgspec.Struct:
            continue
        with suppress(OSError):  # installed without sources
            found |= dict(COMMENT.findall(inspect.getsource(each)))
        found |= {name: _text(words) for name, words in PARAM.findall(inspect.cleandoc(each.__doc__ or ""))}
    return found


def _text(words: str) -> str:
    return " ".join(words.split())


KINDS_OF_FILES: dict[str, Callable[[], Schema]] = {"experiment": experiment, "game": game, "sweep": sweep}
