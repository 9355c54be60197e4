"""Which responses may go to those scorers of reasoning_gym that evaluate them.

Nine scorers run Python's `eval` on the model's output, some by way of sympy's `parse_expr`; it could run any code or
compute 9**9**9**9. A response goes to one of them only when it is what the scorer expects to evaluate.
"""

from __future__ import annotations

import ast

MAX_CHARS = 2000
MAX_DEPTH = 100
MAX_EXPONENT = 20
MAX_NESTED_POWERS = 2

LITERAL_SCORERS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
ARITHMETIC_SCORERS = frozenset({"countdown", "puzzle24"})
ALGEBRA_SCORERS = frozenset({"intermediate_integration", "polynomial_multiplication", "simple_integration"})

_TRIGONOMETRIC = frozenset({"sin", "cos", "tan", "sec", "csc", "cot", "sinh", "cosh", "tanh"})
_INVERSE = frozenset({"asin", "acos", "atan", "asinh", "acosh", "atanh"})
_ALGEBRA_FUNCTIONS = _TRIGONOMETRIC | _INVERSE | {"Abs", "exp", "ln", "log", "sqrt"}
_ALGEBRA_CONSTANTS = frozenset({"pi", "E"})


def may_be_scored(generator: str, response: str) -> bool:
    """Whether it is safe to hand the response to the generator's scorer."""
    if generator in LITERAL_SCORERS:
        tree = _parse(response)
        return tree is None or _is_literal(tree)
    if generator in ARITHMETIC_SCORERS or generator in ALGEBRA_SCORERS:
        tree = _parse(response)
        return tree is not None and _is_formula(tree.body, algebra=generator in ALGEBRA_SCORERS)
    return True


def _parse(response: str) -> ast.Expression | None:
    """The syntax tree; None when the response is no Python expression, so that evaluating it fails at once."""
    if len(response) > MAX_CHARS:
        return None
    try:
        return ast.parse(response.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_literal(tree: ast.Expression) -> bool:
    """Lists of numbers, strings and bare names: evaluating them computes and calls nothing."""
    allowed = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.USub)
    return all(isinstance(node, allowed) for node in ast.walk(tree))


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
            allowed = not isinstance(value, bool) and (not in_exponent or abs(value) <= MAX_EXPONENT)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            allowed = recurse(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            allowed = recurse(left) and recurse(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=right) if algebra and num_powers < MAX_NESTED_POWERS:
            allowed = recurse(left, num_powers + 1) and recurse(right, num_powers + 1, True)
        case ast.Name(id=name) if algebra:
            allowed = len(name) == 1 or name in _ALGEBRA_CONSTANTS
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if algebra:
            allowed = name in _ALGEBRA_FUNCTIONS and recurse(argument)
        case _:
            allowed = False
    return allowed
