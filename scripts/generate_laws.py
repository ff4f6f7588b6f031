"""Writes the scalar laws of ``law.py`` in C, for Triton and JAX; ``--check``: are they current?

A law is a function of NamedTuples of numbers. Its helpers are put in place, so that it becomes one
list of assignments; the two languages differ only in how an expression is spelled:

    law.py                C, native/law.h            Triton, triton_laws.py
    o.lr                  o->lr                      o_lr, an entry of a tuple
    where(c, x, y)        (c ? x : y)                tl.where(c, x, y)
    returned fields       row->a1 = …                returned; other functions load and store

In Triton ``i`` is a block's column in the matrices and ``parameter`` the first column of its
parameter, for what all of its blocks share. JAX keeps the text of the laws: only the functions
they are made of, the first section of ``law.py``, are others.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "adamo_optim"
FILES = ("law.py", "native/law.h", "triton_laws.py", "optax/laws.py")
LAW, C, TRITON, JAX = (PACKAGE / name for name in FILES)
NOTE = "Made of law.py by scripts/generate_laws.py (`make laws`): edit that file, not this one."

COMPARISONS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "=="}
ARITHMETIC = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
LOGIC_C = {ast.BitAnd: "&&", ast.BitOr: "||"}
LOGIC_TRITON = {ast.BitAnd: "&", ast.BitOr: "|"}

# The families of laws: which record they fill, the prefix of their structures in C, the laws.
FAMILIES = {
    "AdamO": ("RECORD", "", ("moments_law", "weights_law")),
    "a weight that turns": ("TURN_RECORD", "Turn", ("square_law", "turn_law")),
}
TABLES = ("Options", "Traits", "Memory")  # the others of a law's arguments lie in the record


class Source:
    """What ``law.py`` holds: constants, NamedTuples and functions."""

    def __init__(self, text: str) -> None:
        scope: dict[str, Any] = {"__name__": "law"}
        exec(compile(text, str(LAW), "exec"), scope)
        tree = ast.parse(text).body
        self.functions = {x.name: x for x in tree if isinstance(x, ast.FunctionDef)}
        self.tuples = {
            x.name: list(scope[x.name]._fields) for x in tree if isinstance(x, ast.ClassDef)
        }
        self.constants = {k: v for k, v in scope.items() if k.isupper() and isinstance(v, float)}
        self.shared: tuple[str, ...] = scope["TURN_SHARED"]
        self.records = {name: list(scope[name]) for name in ("RECORD", "TURN_RECORD")}


class Law:
    """One law as a flat list of assignments (name, expression), and what it returns."""

    def __init__(self, name: str, source: Source) -> None:
        self.name, self.source = name, source
        function = source.functions[name]
        self.arguments = {
            a.arg: ast.unparse(a.annotation) for a in function.args.args if a.annotation
        }
        self.lines: list[tuple[str, ast.expr]] = []
        result = self.flatten(function, {})
        assert isinstance(result, ast.Tuple)
        calls: list[Any] = result.elts
        self.results = [(x.func.id, {k.arg: k.value for k in x.keywords}) for x in calls]

    def flatten(self, function: ast.FunctionDef, names: dict[str, ast.expr]) -> ast.expr:
        """Append the assignments of a function; ``names`` are what its arguments stand for."""
        local = dict(names)
        prefix = "" if function.name == self.name else f"{function.name}_"

        class Rename(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.expr:
                return local.get(node.id, node)

        for statement in function.body:
            if isinstance(statement, ast.Expr):  # the docstring
                continue
            if isinstance(statement, ast.Return):
                assert statement.value is not None
                return Rename().visit(statement.value)
            assert isinstance(statement, ast.Assign), ast.dump(statement)
            target, value = statement.targets[0], Rename().visit(statement.value)
            if isinstance(target, ast.Tuple):
                values: Any = value if isinstance(value, ast.Tuple) else self.inline(value)
                pairs = list(zip(target.elts, values.elts, strict=True))
            else:
                pairs = [(target, value)]
            for one, expression in pairs:
                assert isinstance(one, ast.Name)
                local[one.id] = ast.Name(prefix + one.id)
                self.lines.append((prefix + one.id, expression))
        raise ValueError(f"{function.name} returns nothing")

    def inline(self, call: ast.expr) -> ast.expr:
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Name)
        function = self.source.functions[call.func.id]
        arguments = (a.arg for a in function.args.args)
        return self.flatten(function, dict(zip(arguments, call.args, strict=True)))


class Writer(ABC):
    """Spells expressions; knows which names are flags."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.flags: set[str] = {"active"}
        self.flag_fields: set[str] = set()  # of what earlier laws returned

    def is_flag(self, node: ast.expr) -> bool:
        match node:
            case ast.Compare() | ast.UnaryOp(op=ast.Invert()):
                return True
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr()):
                return True
            case ast.Call(func=ast.Name(id="isfinite")):
                return True
            case ast.Name(id=name):
                return name in self.flags
            case ast.Attribute(value=ast.Name(id="first"), attr=name):
                return name in self.flag_fields
        return False

    def remember(self, law: Law) -> None:
        _, fields = law.results[0]
        self.flag_fields |= {name for name, value in fields.items() if self.is_flag(value)}

    def spell(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name) if name in self.source.constants:
                return repr(self.source.constants[name])
            case ast.Name(id=name):
                return name
            case ast.Constant(value=int() | float() as value):
                return repr(float(value))
            case ast.Attribute(value=ast.Name(id=owner), attr=field):
                return self.field(owner, field)
            case ast.BinOp(left=left, op=op, right=right):
                signs = {**ARITHMETIC, **self.logic}
                return f"({self.spell(left)} {signs[type(op)]} {self.spell(right)})"
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return self.negated(self.spell(operand))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return f"({self.spell(left)} {COMPARISONS[type(op)]} {self.spell(right)})"
            case ast.Call(func=ast.Name(id=name), args=args):
                return self.call(name, [self.spell(x) for x in args], args)
        raise ValueError(f"no way to spell {ast.unparse(node)}")

    def top(self, node: ast.expr) -> str:
        """An expression that stands alone needs no parentheses."""
        text = self.spell(node)
        wrapped = isinstance(node, (ast.BinOp, ast.Compare)) or text.startswith("(")
        return text[1:-1] if wrapped and closes_at_end(text) else text

    logic: dict[type, str]

    @abstractmethod
    def field(self, owner: str, field: str) -> str: ...

    @abstractmethod
    def negated(self, flag: str) -> str: ...

    @abstractmethod
    def call(self, name: str, spelled: list[str], nodes: list[ast.expr]) -> str: ...


def closes_at_end(text: str) -> bool:
    """Does the first parenthesis enclose all of the text?"""
    depth = 0
    for i, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return i == len(text) - 1
    return False


# ---- C -----------------------------------------------------------------------------------------

HEAD_C = f"""/* The scalar laws for one block, on doubles.
   {NOTE} */

#ifndef ADAMO_LAW_H
#define ADAMO_LAW_H

#include <float.h>
#include <math.h>
#include <stdbool.h>

static inline double root(double x)
{{
    return x > 0 ? sqrt(x) : x;
}}

/* NaN stays NaN. */
static inline double at_least(double x, double low)
{{
    return x < low ? low : x;
}}

static inline double at_most(double x, double high)
{{
    return x > high ? high : x;
}}
"""


class WriterC(Writer):
    logic = LOGIC_C

    def field(self, owner: str, field: str) -> str:
        if owner == "first" and field in self.flag_fields:
            return f"(row->{field} > 0)"
        inside = owner in ("o", "traits", "memory")
        return f"{owner if inside else 'row'}->{field}"

    def negated(self, flag: str) -> str:
        return f"!{flag}"

    def call(self, name: str, spelled: list[str], nodes: list[ast.expr]) -> str:
        if name == "where":
            return f"({spelled[0]} ? {spelled[1]} : {spelled[2]})"
        known = {"power": "pow", "absolute": "fabs"}
        return f"{known.get(name, name)}({', '.join(spelled)})"

    def law(self, law: Law, prefix: str) -> str:
        takes_active = "active" in law.source.functions[law.name].args.args[-1].arg
        active = ", bool active" if takes_active else ""
        lines = [
            f"static void {law.name}(const {prefix}Options *o, const {prefix}Traits *traits, "
            f"{prefix}Memory *memory, {prefix}Row *row{active})",
            "{",
        ]
        declared: set[str] = set()
        for name, value in law.lines:
            kind = ("bool " if self.is_flag(value) else "double ") if name not in declared else ""
            if self.is_flag(value):
                self.flags.add(name)
            declared.add(name)
            lines.append(f"    {kind}{name} = {self.top(value)};")
        (_, row), (_, memory) = law.results
        # the row first, from the old memory; then memory, all of it from the old one, too
        lines += [f"    row->{k} = {self.top(v)};" for k, v in row.items()]
        changed = {k: self.top(v) for k, v in memory.items()}
        changed = {k: v for k, v in changed.items() if v != f"memory->{k}"}
        lines += [f"    memory->{k} = {v};" for k, v in changed.items()]
        return "\n".join([*lines, "}"])


def write_c(source: Source) -> str:
    parts = [HEAD_C]
    for title, (record, prefix, laws) in FAMILIES.items():
        parts.append(f"/* ---- {title} ---- */\n")
        for name in TABLES:
            parts.append(structure(prefix + name, source.tuples[prefix + name]))
        parts.append(structure(prefix + "Row", source.records[record]))
        writer = WriterC(source)
        for name in laws:
            law = Law(name, source)
            parts.append(writer.law(law, prefix) + "\n")
            writer.remember(law)
    return "\n".join([*parts, "#endif\n"])


def structure(name: str, fields: list[str]) -> str:
    listed = textwrap.wrap(f"double {', '.join(fields)};", 90, subsequent_indent="    ")
    return "typedef struct {\n    " + "\n    ".join(listed) + f"\n}} {name};\n"


# ---- Triton ------------------------------------------------------------------------------------

HEAD_TRITON = f'''"""The scalar laws as Triton functions of one block.

{NOTE}
"""

# ruff: noqa
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power(base, exponent):
    """base**exponent for a whole exponent >= 1, by squaring: a third of what exp and log take."""
    rest = exponent.to(tl.int32)
    square = base
    result = tl.where(rest % 2 == 1, base, 1.0)
    rest = rest // 2
    while rest > 0:
        square = square * square
        result = tl.where(rest % 2 == 1, result * square, result)
        rest = rest // 2
    return result


@triton.jit
def root(x):
    return tl.where(x > 0, tl.sqrt(x), x)


@triton.jit
def at_least(x, low):
    """NaN stays NaN."""
    return tl.where(x < low, low, x)


@triton.jit
def at_most(x, high):
    return tl.where(x > high, high, x)


@triton.jit
def isfinite(x):
    return tl.abs(x) <= {sys.float_info.max!r}
'''


def is_number(node: ast.expr, source: Source) -> bool:
    return isinstance(node, ast.Constant) or (
        isinstance(node, ast.Name) and node.id in source.constants
    )


class WriterTriton(Writer):
    """A law takes tuples and returns one: what it says of the step, then the new memory."""

    logic = LOGIC_TRITON

    def field(self, owner: str, field: str) -> str:
        return f"{owner}_{field}"

    def negated(self, flag: str) -> str:
        return f"({flag} == 0)"

    def call(self, name: str, spelled: list[str], nodes: list[ast.expr]) -> str:
        # a number alone would become a float32 inside another function
        wide = [
            f"tl.full([], {text}, tl.float64)" if is_number(node, self.source) else text
            for node, text in zip(nodes, spelled, strict=True)
        ]
        if name in ("root", "power", "at_least", "at_most", "isfinite"):
            return f"{name}({', '.join(wide)})"
        known = {"absolute": "abs"}
        return f"tl.{known.get(name, name)}({', '.join(spelled)})"

    def law(self, law: Law, prefix: str) -> str:
        body: list[str] = []
        for name, value in law.lines:
            if self.is_flag(value):
                self.flags.add(name)
            body.append(f"{name} = {self.top(value)}")
        results = [self.top(v) for _, fields in law.results for v in fields.values()]
        code = "\n".join(f"    {x}" for x in body) + "\n" + returned(results)
        given = {
            a: [f"{a}_{field}" for field in self.source.tuples[kind]]
            for a, kind in law.arguments.items()
            if kind in self.source.tuples
        }
        numbers = [x for a in ("o", "traits", "memory") for x in given.pop(a)]
        if "first" in given:  # what the law before has returned, the new memory included
            given["first"] += [f"memory_{x}" for x in self.source.tuples[prefix + "Memory"]]
        unpacked = []
        for owner, names in {"numbers": numbers, **given}.items():
            for place, name in enumerate(names):
                if re.search(rf"\b{name}\b", code):
                    unpacked.append(f"    {name} = {owner}[{place}]")
        arguments = ["numbers", *given, *(["active"] if "active" in law.arguments else [])]
        head = ["@triton.jit", f"def {law.name}({', '.join(arguments)}):"]
        return "\n".join([*head, *unpacked, code])


def transfer(source: Source, writer: WriterTriton, law: Law, prefix: str, record: str) -> list[str]:
    """Functions that store what a law returns, and load it for the law after it."""
    fields = [*law.results[0][1]]
    places = [f"record + {source.records[record].index(x)}" for x in fields]
    places += [f"memory + {k}" for k in range(len(source.tuples[prefix + "Memory"]))]
    stores = [
        f"    tl.store({place} * blocks + i, result[{k}].to(tl.float64))"
        for k, place in enumerate(places)
    ]
    loads = [
        f"tl.load({place} * blocks + i)" + (" > 0" if x in writer.flag_fields else "")
        for place, x in zip(places, [*fields, *source.tuples[prefix + "Memory"]], strict=True)
    ]
    head = f"@triton.jit\ndef {{}}_{law.name.removesuffix('_law')}(record, memory, blocks, i"
    store = "\n".join([head.format("store") + ", result):", *stores, ""])
    return [store, head.format("load") + "):\n" + returned(loads)]


def returned(values: list[str]) -> str:
    return "    return (\n" + "".join(f"        {x},\n" for x in values) + "    )\n"


def numbers(source: Source, prefix: str) -> str:
    """A function that loads what is known before a step: options, traits and memory."""
    tables = {"settings": "Options", "traits": "Traits", "memory": "Memory"}
    loads, shared = [], source.shared if prefix else ()  # AdamO's have a number each
    for table, kind in tables.items():
        for k, field in enumerate(source.tuples[prefix + kind]):
            own = table == "memory" and field not in shared
            loads.append(f"tl.load({table} + {k} * blocks + {'i' if own else 'parameter'})")
    name = f"{prefix.lower()}_numbers" if prefix else "numbers"
    return (
        f"@triton.jit\ndef load_{name}(settings, traits, memory, blocks, i, parameter):\n"
        + returned(loads)
    )


def write_triton(source: Source) -> str:
    parts = [HEAD_TRITON]
    for record, prefix, laws in FAMILIES.values():
        writer = WriterTriton(source)
        parts.append(numbers(source, prefix))
        for name in laws:
            law = Law(name, source)
            parts.append(writer.law(law, prefix))
            writer.remember(law)
            store, load = transfer(source, writer, law, prefix, record)
            parts += [store] if name == laws[-1] else [store, load]
    return "\n\n".join(parts)


# ---- JAX ---------------------------------------------------------------------------------------

HEAD_JAX = f'''"""The scalar laws as functions of JAX arrays.

{NOTE}
"""

# ruff: noqa
from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array as Tensor

where, isfinite, absolute, cos, sin = jnp.where, jnp.isfinite, jnp.abs, jnp.cos, jnp.sin
'''

LANGUAGE_JAX = '''

def root(x: Tensor) -> Tensor:
    """√x with a finite derivative at 0."""
    positive = x > 0
    return where(positive, jnp.sqrt(where(positive, x, 1.0)), x)


def power(base: float | Tensor, exponent: Tensor) -> Tensor:
    return base**exponent


# float64's largest and smallest numbers are ∞ and 0 in float32: its own stand in for them


def at_least(x: Tensor, low: float | Tensor) -> Tensor:
    """NaN stays NaN."""
    if isinstance(low, float) and low > 0:
        low = max(low, float(jnp.finfo(x.dtype).tiny))
    return where(x < low, low, x)


def at_most(x: Tensor, high: float | Tensor) -> Tensor:
    if isinstance(high, float):
        high = min(high, float(jnp.finfo(x.dtype).max))
    return where(x > high, high, x)


'''


def write_jax(source: Source, text: str) -> str:
    constants = "".join(f"{name} = {value!r}\n" for name, value in source.constants.items())
    return HEAD_JAX + constants + LANGUAGE_JAX + text[text.index("# ---- AdamO ---") :]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a file is old")
    check = parser.parse_args().check
    law = LAW.read_text()
    source = Source(law)
    written = {C: write_c(source), TRITON: write_triton(source), JAX: write_jax(source, law)}
    old = []
    for path, text in written.items():
        if path.exists() and path.read_text() == text:
            continue
        old.append(path.name)
        if not check:
            path.write_text(text)
    if check and old:
        print(f"older than law.py: {', '.join(old)}; run `make laws`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
