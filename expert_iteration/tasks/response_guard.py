"""Which answers may go to a scorer of reasoning_gym.

Nine scorers run Python's `eval` on the model's output, some by way of sympy's `parse_expr`: it could run any code, read
the gold answer from the scorer's variables or compute 9**9**9**9. Others loop as often as the answer says, or take time
that grows with the square of its length. An answer goes to a scorer only when it is of the kind that the scorer is for.
"""

from __future__ import annotations

import ast
import re

MAX_CHARS = 100_000
MAX_FORMULA_CHARS = 2000
MAX_DEPTH = 100
MAX_EXPONENT = 20
MAX_NESTED_POWERS = 2
MAX_MOVES = 10_000
MAX_MOVE_DIGITS = 5

LITERAL_SCORERS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
ARITHMETIC_SCORERS = frozenset({"countdown", "puzzle24"})
ALGEBRA_SCORERS = frozenset({"intermediate_integration", "polynomial_multiplication", "simple_integration"})
MOVE_SCORERS = frozenset({"rubiks_cube", "rush_hour"})
"""They repeat a move as often as the number behind it says."""
NAN_SCORERS = frozenset({"complex_arithmetic", "number_sorting"})
"""They take NaN for right, because no difference from it is too large."""
QUADRATIC_SCORERS = {"boxnet": 10_000, "codeio": 4000, "propositional_logic": 1000}
"""Most characters of an answer to those that search it, or compare it with the gold, in more than linear time."""

_TRIGONOMETRIC = frozenset({"sin", "cos", "tan", "sec", "csc", "cot"})
_INVERSE = frozenset({"asin", "acos", "atan", "asinh", "acosh", "atanh"})
_EXPONENTIAL = frozenset({"exp", "sinh", "cosh", "tanh"})
_ALGEBRA_FUNCTIONS = _TRIGONOMETRIC | _INVERSE | _EXPONENTIAL | {"Abs", "ln", "log", "sqrt"}
_ALGEBRA_CONSTANTS = frozenset({"pi", "E"})
# sympy keeps a float's exponent: the integer part of 1e999999999 has a billion digits.
_ALGEBRA_TEXT = re.compile(r"(?!.*[0-9.][eE])[\x20-\x7e\s]*", re.DOTALL)
# A number in any other form escapes countdown's and puzzle24's search for the numbers used: 0e0, 0x64, 1_0.
_ARITHMETIC_TEXT = re.compile(r"[0-9\s+*/()-]*", re.ASCII)


def may_be_scored(generator: str, answer: str) -> bool:
    """Whether it is safe to hand the answer to the generator's scorer."""
    if len(answer) > QUADRATIC_SCORERS.get(generator, MAX_CHARS):
        safe = False
    elif generator in LITERAL_SCORERS:
        safe = _is_literal_or_no_expression(answer)
    elif generator in ARITHMETIC_SCORERS:
        safe = _ARITHMETIC_TEXT.fullmatch(answer) is not None and _is_formula_text(answer, algebra=False)
    elif generator in ALGEBRA_SCORERS:
        safe = _ALGEBRA_TEXT.fullmatch(answer) is not None and _is_formula_text(answer, algebra=True)
    elif generator in MOVE_SCORERS:
        numbers = re.findall(r"\d+", answer)
        is_short = all(len(number) <= MAX_MOVE_DIGITS for number in numbers)
        safe = is_short and sum(map(int, numbers)) + len(answer.split()) <= MAX_MOVES
    elif generator in NAN_SCORERS:
        safe = "nan" not in answer.casefold()
    else:
        safe = True
    return safe


def _is_literal_or_no_expression(answer: str) -> bool:
    """Lists of numbers, strings and names in capitals, which no variable of a scorer has: evaluating them computes and
    calls nothing. What is no Python expression fails to be evaluated, and is compared as text."""
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return True
    except (RecursionError, MemoryError):  # the syntax tree is too deep, which does not keep `eval` from running it
        return False
    allowed = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.USub)
    nodes = list(ast.walk(tree))
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    return all(isinstance(node, allowed) for node in nodes) and all(name.isupper() or name == "_" for name in names)


def _is_formula_text(answer: str, *, algebra: bool) -> bool:
    if len(answer) > MAX_FORMULA_CHARS:
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return _is_formula(tree.body, algebra=algebra)


def _is_formula(
    node: ast.expr, *, algebra: bool, depth: int = 0, num_powers: int = 0, in_exponent: bool = False
) -> bool:
    """Sums, products and quotients of numbers; with `algebra` also variables, known functions and bounded powers."""

    def recurse(child: ast.expr, powers: int = num_powers, exponent: bool = in_exponent) -> bool:
        return _is_formula(child, algebra=algebra, depth=depth + 1, num_powers=powers, in_exponent=exponent)

    match node:
        case _ if depth > MAX_DEPTH:
            allowed = False
        case ast.Constant(value=int() | float() as value):
            is_bounded = value == 0 or 1 / MAX_EXPONENT <= abs(value) <= MAX_EXPONENT
            allowed = not isinstance(value, bool) and (not in_exponent or is_bounded)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            allowed = recurse(operand)
        case ast.BinOp(left=left, op=ast.Mult(), right=right) if in_exponent:
            powers = num_powers + 1  # x**(20*20*20) is a power as ((x**20)**20)**20 is
            allowed = num_powers <= MAX_NESTED_POWERS and recurse(left, powers) and recurse(right, powers)
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=int() | float() as divisor)) if in_exponent:
            allowed = not isinstance(divisor, bool) and 1 <= divisor <= MAX_EXPONENT and recurse(left)
        case ast.BinOp(op=ast.Div()) | ast.BinOp(left=ast.Constant() | ast.UnaryOp() | ast.BinOp(), op=ast.Pow()) if (
            in_exponent
        ):
            allowed = False  # x**(1/0.001), x**20**20
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            allowed = recurse(left) and recurse(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=right) if algebra and num_powers < MAX_NESTED_POWERS:
            allowed = recurse(left, num_powers + 1) and recurse(right, num_powers + 1, True)
        case ast.Name(id=name) if algebra:
            allowed = len(name) == 1 or name in _ALGEBRA_CONSTANTS
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if algebra and name in _EXPONENTIAL:
            allowed = num_powers < MAX_NESTED_POWERS and recurse(argument, num_powers + 1)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if algebra:
            allowed = name in _ALGEBRA_FUNCTIONS and recurse(argument)
        case _:
            allowed = False
    return allowed
