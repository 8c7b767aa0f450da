"""A policy as one C99 file: arrays and a function, no memory to allocate, nothing to link but libm. In floats, or in
whole numbers of 8 bits with sums of 32."""

import math
import re
from collections.abc import Iterable, Iterator

import numpy as np

from sparring.export.tape import Op, Tape, build
from sparring.export.whole_numbers import Whole
from sparring.games import Box, Dict, Discrete, MultiDiscrete
from sparring.games.spec import Array, Space
from sparring.networks.plain import Plain
from sparring.networks.spec import action_size, choices, feature_shape, scaling

__all__ = ["render", "render_whole"]

HEAD = """\
/* A policy of the game {game}, in {kind}. Made by Sparring; do not edit.
 *
 *   {signature}
 *
 * obs: {obs}
 * action: {action}
 * outputs: the head's numbers ({outputs}); may be NULL.{value}
 *
 * C99, no memory is allocated, link with -lm. Not for two threads at once: it computes in static arrays.
 */
#include <math.h>
#include <stdint.h>
#include <stddef.h>

/* GCC makes vectors of a short loop only if it does not unroll it before. */
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 8
#define ROLLED _Pragma("GCC unroll 1")
#else
#define ROLLED
#endif
"""


def render(plain: Plain) -> bytes:
    tape = build(plain)
    lines = [
        _head(plain, tape, "floats"),
        *_constant("float", "scale", plain.scale),
        *_constant("float", "offset", plain.offset),
    ]
    for i, op in enumerate(tape.ops):
        if op.w is not None:
            lines += _constant("float", f"w{i}", op.w) + _constant("float", f"b{i}", op.b)
    lines += _tensors(tape, "float")
    lines += [_signature(plain, tape), "{", "    int i;"]
    n, clip = int(np.prod(plain.shape)), plain.clip
    x = f"(float)obs[i] * {_at('scale', plain.scale)} + {_at('offset', plain.offset)}"
    lines.append(f"    for (i = 0; i < {n}; i++) t0[i] = {f'between({x}, -{clip!r}f, {clip!r}f)' if clip else x};")
    for i, op in enumerate(tape.ops):
        lines += [f"    {line}" for line in _float_op(tape, i, op)]
    lines += _finish(plain, tape, [f"t{tape.outputs['outputs']}[i]"], plain.bound)
    return "\n".join([*lines, "}", ""]).encode()


def render_whole(whole: Whole) -> bytes:
    plain, tape = whole.exact, whole.tape
    lines = [_head(plain, tape, "whole numbers of 8 bits"), *_constant("float", "factor", whole.factor)]
    lines += _constant("float", "shift", whole.shift)
    for i, (w, b, scale) in whole.weights.items():
        op = tape.ops[i]
        lines += _constant("int8_t", f"w{i}", w) + _constant("int32_t", f"b{i}", b)
        ratio = whole.forms[op.inputs[0]].scale * scale / whole.forms[op.output].scale
        lines += _constant("float", f"m{i}", ratio)
    lines += [*_tensors(tape, "int8_t"), WHOLE, _signature(plain, tape), "{", "    int i;"]
    copies = whole.factor.size // int(np.prod(plain.shape)) if whole.factor.ndim == 1 else 1
    size, n = int(np.prod(tape.shapes[0])), int(np.prod(plain.shape))
    place = f"obs[i % {n}]" if copies > 1 else "obs[i]"
    x = f"(float){place} * {_at('factor', whole.factor)} + {_at('shift', whole.shift)}"
    lines.append(f"    for (i = 0; i < {size}; i++) t0[i] = whole({x});")
    for i, op in enumerate(tape.ops):
        lines += [f"    {line}" for line in _whole_op(whole, i, op)]
    number = tape.outputs["outputs"]
    form = whole.forms[number]
    lines += _finish(plain, tape, [f"((float)t{number}[i] - {form.zero}) * {_number(form.scale)}"], whole.bound, whole)
    return "\n".join([*lines, "}", ""]).encode()


def _head(plain: Plain, tape: Tape, kind: str) -> str:
    action, size = plain.game.action, plain.outputs
    obs = _part(plain.game.observation, "pixels of 0 to 255")
    if isinstance(action, Box):
        gives = f"{size} numbers"
    else:
        gives = "one choice" if isinstance(action, Discrete) else f"{len(choices(action))} choices"
    value = "\n * value: what the state is worth; may be NULL." if "value" in tape.outputs else ""
    signature = _signature(plain, tape)
    return HEAD.format(
        game=re.sub(r"[^\w.-]", "", plain.game.name), kind=kind, signature=signature, obs=obs, action=gives,
        outputs=size, value=value,
    ) + BETWEEN * ((plain.clip is not None and kind == "floats") or isinstance(action, Box))  # fmt: skip


def _part(space: Space, pixels: str) -> str:
    """How an observation is spread over numbers: as `networks.plain.pixels` does it."""
    if isinstance(space, Dict):
        return "\n *   ".join(["numbers, field after field:", *_fields(space)])
    numbers = f"{math.prod(feature_shape(space))} numbers"
    if isinstance(space, Discrete):
        last = space.start + space.n - 1
        return f"{numbers}, a 1 for the choice ({space.start} is the first, {last} the last), else 0"
    if isinstance(space, MultiDiscrete):
        sizes = " + ".join(map(str, space.nvec[:MOST_NAMED])) + " + ..." * (len(space.nvec) > MOST_NAMED)
        return f"{numbers} ({sizes}), in each part a 1 for its choice (0 is the first), else 0"
    shape = " × ".join(map(str, feature_shape(space) if space.is_image else space.shape))
    if space.is_image:
        return f"{shape} {pixels} (rows, columns, channels)"
    return f"{shape} numbers" if shape else "1 number"


def _fields(space: Dict) -> Iterator[str]:
    start = 0
    for name in sorted(space.fields):
        part = space.fields[name]
        yield f"from obs[{start}], {name}: {_part(part, 'pixels, each divided by 255')}"
        start += math.prod(feature_shape(part))


MOST_NAMED = 16  # sizes of a space of many choices
TILE = 64  # outputs that are summed up together: as many sums as a large processor's registers hold

BETWEEN = """
static float between(float x, float low, float high)
{
    return x < low ? low : x > high ? high : x;
}
"""
WHOLE = """
static int8_t whole(float x)
{
    x = x < -128.0f ? -128.0f : x > 127.0f ? 127.0f : x;
    return (int8_t)lrintf(x);
}
"""


def _signature(plain: Plain, tape: Tape) -> str:
    kind = "uint8_t" if plain.image else "float"
    made = "float" if isinstance(plain.game.action, Box) else "int32_t"
    if isinstance(plain.game.action, Box) and plain.game.action.dtype == "float64":
        made = "double"
    value = ", float *value" if "value" in tape.outputs else ""
    return f"void policy_act(const {kind} *obs, {made} *action, float *outputs{value})"


def _constant(kind: str, name: str, array: Array | None) -> list[str]:
    assert array is not None
    flat = _few(np.asarray(array)).reshape(-1)
    texts = [_number(x) for x in flat.tolist()] if kind == "float" else [_whole_number(x) for x in flat.tolist()]
    rows = [", ".join(texts[i : i + 12]) for i in range(0, len(texts), 12)]
    return [f"static const {kind} {name}[{len(texts)}] = {{", ",\n".join(f"    {row}" for row in rows), "};"]


def _few(array: Array) -> Array:
    """One number where all are the same."""
    return array.reshape(-1)[:1] if array.size > 1 and (array == array.reshape(-1)[0]).all() else array


def _at(name: str, array: Array, index: str = "i") -> str:
    return f"{name}[0]" if _few(np.asarray(array)).size == 1 else f"{name}[{index}]"


def _number(x: float) -> str:
    if np.isinf(x):
        return "INFINITY" if x > 0 else "-INFINITY"
    text = f"{float(x):.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def _whole_number(x: int) -> str:
    return f"(-{2**31 - 1} - 1)" if x == -(2**31) else str(x)


def _tensors(tape: Tape, kind: str) -> list[str]:
    same = {op.output for op in tape.ops if op.kind == "reshape"}
    sizes = {i: int(np.prod(shape)) for i, shape in enumerate(tape.shapes) if i not in same}
    return [f"static {kind} t{i}[{size}];" for i, size in sizes.items()]


def _source(tape: Tape, number: int) -> int:
    """A tensor that is only seen in another shape is the one that it is of."""
    for op in tape.ops:
        if op.output == number and op.kind == "reshape":
            return _source(tape, op.inputs[0])
    return number


def _float_op(tape: Tape, i: int, op: Op) -> list[str]:
    out, size = f"t{op.output}", int(np.prod(tape.shapes[op.output]))
    given = [f"t{_source(tape, j)}" for j in op.inputs]
    each = f"for (i = 0; i < {size}; i++) {out}[i] ="
    x = f"{given[0]}[i]"
    match op.kind:
        case "dense":
            return _dense(tape, i, op, given[0], "float", f"b{_index(op, 'b', i)}", "sum[q]")
        case "conv":
            return _conv(tape, i, op, given[0], "float", f"b{_index(op, 'b', i)}", "sum[q]")
        case "reshape":
            return []
        case "relu":
            return [f"{each} {x} > 0.0f ? {x} : 0.0f;"]
        case "tanh":
            return [f"{each} tanhf({x});"]
        case "sigmoid":
            return [f"{each} 1.0f / (1.0f + expf(-{x}));"]
        case "multiply":
            one = int(np.prod(tape.shapes[op.inputs[1]])) == 1
            lines = [f"{each} {x} * {given[1]}[{'0' if one else 'i'}];"]
            return [*lines, f"for (i = 0; i < {size}; i++) if ({out}[i] < 0.0f) {out}[i] = 0.0f;"] if op.relu else lines
        case "rsqrt":
            return [f"{out}[0] = 1.0f / sqrtf({given[0]}[0]);"]


def _index(op: Op, letter: str, i: int, index: str = "o + q") -> str:
    array = {"b": op.b}[letter]
    assert array is not None
    return f"{i}[0]" if _few(array).size == 1 else f"{i}[{index}]"


def _dense(tape: Tape, i: int, op: Op, x: str, kind: str, bias: str, result: str, zero: str = "") -> list[str]:
    """As a convolution whose kernel is all that there is."""
    n, size = int(np.prod(tape.shapes[op.inputs[0]])), int(np.prod(tape.shapes[op.output]))
    body = [f"for (j = 0; j < {n}; j++)", f"    {_sums(i, op, size, f'{x}[j]', zero, f'j * {size}')}"]
    return ["{", "    int o, j, q;", *_tiles(op, size, kind, bias, body, f"t{op.output}[o + q]", result), "}"]


def _tiles(op: Op, size: int, kind: str, bias: str, body: list[str], out: str, result: str) -> list[str]:
    """Some outputs at a time: their sums stay in registers, and one input serves all of them. The last ones are
    computed twice where their number does not come out even."""
    tile, each = min(size, TILE), _each(size, kind != "float")
    lines = [f"for (o = 0; o < {size}; o += {tile}) {{"]
    if size % tile:
        lines.append(f"    if (o > {size - tile}) o = {size - tile};")
    lines += [f"    {kind} sum[{tile}];", f"    {each} sum[q] = {bias};", *(f"    {line}" for line in body)]
    lines += [f"    {each} {out} = {_relu(op, result, kind)};", "}"]
    return [f"    {line}" for line in lines]


def _each(size: int, whole: bool) -> str:
    """Of whole numbers GCC makes more when it unrolls."""
    return f"{'' if whole else 'ROLLED '}for (q = 0; q < {min(size, TILE)}; q++)"


def _sums(i: int, op: Op, size: int, x: str, zero: str, start: str) -> str:
    assert op.w is not None
    w = f"w{i}[{start} + o + q]" if _few(op.w).size > 1 else f"w{i}[0]"
    return f"{_each(size, bool(zero))} sum[q] += {_term(x, w, zero)};"


def _term(x: str, w: str, zero: str) -> str:
    return f"({x}{zero}) * {w}" if zero else f"{x} * {w}"


def _relu(op: Op, result: str, kind: str) -> str:
    return f"{result} > 0.0f ? {result} : 0.0f" if op.relu and kind == "float" else result


def _conv(tape: Tape, i: int, op: Op, x: str, kind: str, bias: str, result: str, zero: str = "") -> list[str]:
    """Rows and columns; filters; then the rows of the kernel that lie within the image, each a run of numbers."""
    (h, width, channels), (rows, columns, filters) = tape.shapes[op.inputs[0]], tape.shapes[op.output]
    assert op.w is not None
    k, s = len(op.w), op.stride
    top, left = op.pads[0][0], op.pads[1][0]
    body = [
        f"for (a = 0; a < {k}; a++) {{",
        f"    const int row = y * {s} + a - {top};",
        f"    if (row < 0 || row >= {h}) continue;",
        "    for (j = first; j < last; j++)",
        "        " + _sums(i, op, filters, f"{x}[(row * {width} + x * {s} - {left}) * {channels} + j]", zero,
                           f"(a * {k * channels} + j) * {filters}"),
        "}",
    ]  # fmt: skip
    out = f"t{op.output}[(y * {columns} + x) * {filters} + o + q]"
    return [
        "{",
        "    int y, x, o, a, j, q;",
        f"    for (y = 0; y < {rows}; y++) for (x = 0; x < {columns}; x++) {{",
        f"        const int first = x * {s} < {left} ? ({left} - x * {s}) * {channels} : 0;",
        f"        const int beyond = x * {s} - {left} + {k} - {width};",
        f"        const int last = ({k} - (beyond > 0 ? beyond : 0)) * {channels};",
        *(f"    {line}" for line in _tiles(op, filters, kind, bias, body, out, result)),
        "    }",
        "}",
    ]


def _whole_op(whole: Whole, i: int, op: Op) -> list[str]:
    """Sums are whole; what comes of them is brought to its scale in float, as `Whole.outputs` does."""
    tape, forms = whole.tape, whole.forms
    out, size = f"t{op.output}", int(np.prod(tape.shapes[op.output]))
    given = [f"t{_source(tape, j)}" for j in op.inputs]
    scale, zero = forms[op.output]
    if op.kind == "reshape":
        return []
    x = f"({given[0]}[i] - ({forms[op.inputs[0]].zero})) * {_number(forms[op.inputs[0]].scale)}"
    each = f"for (i = 0; i < {size}; i++) {out}[i] ="
    if op.w is not None:
        made = whole.weights[i]
        bias = f"b{i}[0]" if _few(made.b).size == 1 else f"b{i}[o + q]"
        ratio = f"m{i}[0]" if _few(made.scale).size == 1 else f"m{i}[o + q]"
        result = f"(float)sum[q] * {ratio}"
        result = f"whole(({result} > 0.0f ? {result} : 0.0f) + {zero})" if op.relu else f"whole({result} + {zero})"
        small = op._replace(w=made.w)
        less = f" - ({forms[op.inputs[0]].zero})"
        return (_dense if op.kind == "dense" else _conv)(tape, i, small, given[0], "int32_t", bias, result, less)
    if op.kind == "multiply":
        one = int(np.prod(tape.shapes[op.inputs[1]])) == 1
        form = forms[op.inputs[1]]
        number = f"{x} * (({given[1]}[{'0' if one else 'i'}] - ({form.zero})) * {_number(form.scale)})"
    else:
        number = {
            "tanh": f"tanhf({x})", "sigmoid": f"1.0f / (1.0f + expf(-({x})))", "rsqrt": f"1.0f / sqrtf({x})",
            "relu": x,
        }[op.kind]  # fmt: skip
    if op.relu or op.kind == "relu":
        return [f"for (i = 0; i < {size}; i++) {{", f"    const float y = {number};",
                f"    {out}[i] = whole((y > 0.0f ? y : 0.0f) / {_number(scale)} + {zero});", "}"]  # fmt: skip
    return [f"{each} whole(({number}) / {_number(scale)} + {zero});"]


def _finish(plain: Plain, tape: Tape, number: list[str], bound: str, whole: Whole | None = None) -> list[str]:
    """Outputs, the value, the action."""
    (out,), size = number, plain.outputs
    lines = [f"    if (outputs != NULL) for (i = 0; i < {size}; i++) outputs[i] = {out};"]
    if "value" in tape.outputs:
        place = tape.outputs["value"]
        text = f"t{place}[0]"
        if whole is not None:
            scale, zero = whole.forms[place]
            text = f"((float){text} - {zero}) * {_number(scale)}"
        lines.append(f"    if (value != NULL) *value = {text};")
    return lines + (_numbers(plain, out, bound) if isinstance(plain.game.action, Box) else list(_picks(plain, tape)))


def _numbers(plain: Plain, out: str, bound: str) -> list[str]:
    action = plain.game.action
    assert isinstance(action, Box)
    s, size = scaling(action), action_size(action)
    names = {"half": s.half, "centre": s.centre, "low": s.low, "high": s.high, "least": s.unit_low, "most": s.unit_high}
    lines: list[str] = []
    wide = action.dtype == "float64"
    for name, array in names.items():
        text = [_wide(x) if wide and name not in ("least", "most") else _number(x) for x in np.asarray(array).tolist()]
        kind = "double" if wide and name not in ("least", "most") else "float"
        lines.append(f"    static const {kind} {name}[{size}] = {{{', '.join(text)}}};")
    unit = f"tanhf({out})" if bound == "tanh" else f"between({out}, least[i], most[i])"
    kind = "double" if wide else "float"
    unused = ["    (void)least; (void)most;"] if bound == "tanh" else []
    return [
        *lines, *unused,
        f"    for (i = 0; i < {size}; i++) {{",
        f"        const {kind} x = centre[i] + half[i] * ({kind})({unit});",
        "        action[i] = x < low[i] ? low[i] : x > high[i] ? high[i] : x;",
        "    }",
    ]  # fmt: skip


def _wide(x: float) -> str:
    if np.isinf(x):
        return "INFINITY" if x > 0 else "-INFINITY"
    text = repr(float(x))
    return text if "." in text or "e" in text else f"{text}.0"


def _picks(plain: Plain, tape: Tape) -> Iterable[str]:
    """Of each part the first of the largest."""
    action, out, start = plain.game.action, f"t{tape.outputs['outputs']}", 0
    first = action.start if isinstance(action, Discrete) else 0
    for place, n in enumerate(choices(action)):
        yield f"    action[{place}] = {start};"
        yield f"    for (i = {start + 1}; i < {start + n}; i++)"
        yield f"        if ({out}[i] > {out}[action[{place}]]) action[{place}] = i;"
        if first != start:
            yield f"    action[{place}] += {first - start};"
        start += n
