#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/house/draw_words.py: messages and comments drawn at random, for a reader who judges them.
#
#   draw_words.py [--root DIR] [--seed N] [--messages N] [--comments N] [--all]
#
# A message passes if it has a subject and a verb, says the cause and where sensible the fix, and is understood at one
# reading. A comment passes if it says why, or at a declaration what it does, and is understood at one reading.
#
# The population is found by parsing, never by lines:
# - A message is a text of MESSAGE_WORDS words or more, in the sources that are not tests. Adjacent literals are one text,
#   and so is a chain of literals and values joined by `+`; a value stands as {}.
# - Not messages: what labels a value in a table or stands in a help's values column (`.values`, `->type_name`, fewer words
#   than that, columns of spaces or bars, a short element of a list in braces, what a short `case` returns); the names of
#   spans, kernels, rows and owners of memory (the calls in LABELS), and what doctor says beside each of its labels; what
#   completes another sentence (it begins with a space or a mark, or is given to a call in HALVES); the operands of
#   ZIGGURAT_CHECK, which stand beside its condition; static_assert; raw literals, which are programs, pages and data; JSON;
#   patterns of `re`; code that a script runs.
# - A comment is a block of lines of one mark and column, a trailing `///<` with the lines that go on with it, or a
#   docstring, of COMMENT_WORDS words or more. Not comments: licences, directives to tools, ends of namespaces.
# A help text is a message that may be a noun phrase or a command. A trailing comment is judged with the code beside it.
import argparse
import ast
import io
import random
import re
import tokenize
from collections import namedtuple
from pathlib import Path

TOP = ["aio", "base", "bench", "collectives", "core", "integrations", "optimizer", "tiers"]
MESSAGE_WORDS = 4
ELEMENT_WORDS = 6  # an element of a list in braces, or what a case returns, is a name if it is shorter
COMMENT_WORDS = 4
SEED = 20261126

Found = namedtuple("Found", "path line text beside")  # beside: the code that a comment is of
Token = namedtuple("Token", "kind text line")  # kind: string, raw, comment, other

WORD = re.compile(r"(?<![\w.{%/-])[A-Za-z][a-z']*(?![\w({=/]|\.\w)")
TOKENS = re.compile(
    r"""(?P<line_comment>//(?:[^\n\\]|\\.)*(?:\\\n[^\n]*)*)
      | (?P<block_comment>/\*.*?\*/)
      | (?P<raw>(?:u8|[uUL])?R"(?P<delimiter>[^()\s\\]{0,16})\(.*?\)(?P=delimiter)")
      | (?P<string>(?:u8|[uUL])?"(?:[^"\\\n]|\\.)*")
      | (?P<character>(?:u8|[uUL])?'(?:[^'\\\n]|\\.)+')
      | (?P<number>\.?\d(?:'?[\w.]|[eEpP][+-])*)
      | (?P<directive>^[ \t]*\#[ \t]*(?:include|error|pragma|if|elif|endif|else|undef|ifdef|ifndef)(?:\\\n|[^\n])*?(?=//|\n|$))
      | (?P<word>[A-Za-z_]\w*)
      | (?P<mark>->|::|[^\s])""",
    re.VERBOSE | re.DOTALL | re.MULTILINE)
ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\", "'": "'", "r": "\r", "0": "\0"}
LABELS = {"track", "span", "run_all", "launch_program", "row", "owner", "key", "open_svg", "text", "values", "type_name"}
DOCTOR = "integrations/cli/doctor.cc"  # say(label, value)
# What translates DeepSpeed's configuration begins these texts with the file and the key that they are about.
BEGUN = ({"config_json.cc", "deepspeed_defaults.cc", "deepspeed_keys.cc", "deepspeed_script_keys.cc", "setting_json.cc",
          "translation.cc", "translation_complete.cc", "translation_script.cc"}, 'FILE: "KEY" ')
HALVES = {"together", "first_rank_does", "require_whole"}
NOT_SAID = {"static_assert", "ZIGGURAT_CHECK", *LABELS, *HALVES}
CODE = re.compile(r"[;{}]\s*\n|\b(?:import|def|return|const|float|var\()\b.*[=(;]|</\w+>|<\w+ \w+=|^\w+ \(\w+ ")
DIRECTIVES = re.compile(r"^(?:SPDX-|NOLINT|clang-format|namespace\b|end of|noqa|pylint|type:|README (?:begins|ends)|!/usr)")


def words(text):
    """The words of a text: no placeholders, flags, paths, names with underscores or names that are called."""
    text = re.sub(r"\{[^{}]*\}|`[^`]*`|%[-+#0-9.]*l?[a-zA-Z]", " 0 ", text)
    return WORD.findall(text)


def is_message(text):
    if len(words(text)) < MESSAGE_WORDS or CODE.search(text) or re.match(r"<|\||%s\{|\{?\"", text) or "| |" in text:
        return False
    if not re.match(r"[\w`'\"{%(\[\n-]", text) or re.match(r"\{[^{}]*\}[,;:]? *$", text):
        return False
    return not re.search(r"\S   |\S  .*\S  ", text)  # columns of a table


def cpp_tokens(source):
    for match in TOKENS.finditer(source):
        kind = match.lastgroup
        if kind == "delimiter":
            kind = "raw"
        yield Token(kind, match[0], source.count("\n", 0, match.start()) + 1)


def unescaped(literal):
    body = literal[literal.index('"') + 1:-1]
    return re.sub(r"\\(.)", lambda m: ESCAPES.get(m[1], m[0]), body, flags=re.DOTALL)


def cpp_messages(source):
    """The literals, with adjacent ones and chains of `+` joined: (line, text, the member and the calls that it is given to,
    the token before it, whether it is an element of a list in braces or what a case returns)."""
    tokens = [t for t in cpp_tokens(source) if t.kind not in ("line_comment", "block_comment", "directive")]
    callees = []  # what each open parenthesis or brace belongs to
    at = 0

    def name_before(index):
        if index >= 0 and tokens[index].kind == "word":
            return tokens[index].text
        return ""

    while at < len(tokens):
        token = tokens[at]
        if token.text in "([{" and token.kind == "mark":
            callees.append("{" if token.text == "{" else name_before(at - 1))
        elif token.text in ")]}" and token.kind == "mark" and callees:
            callees.pop()
        elif token.kind == "string":
            member = name_before(at - 2) if tokens[at - 1].text == "=" else ""
            line, begin, text = token.line, at, ""
            while at < len(tokens):
                if tokens[at].kind == "string":
                    text += unescaped(tokens[at].text)
                    at += 1
                    continue
                following = chained(tokens, at)
                if following is None:
                    break
                text += "{}"
                at = following
            before = tokens[begin - 1].text if begin else ""
            element = bool(callees) and callees[-1] == "{" and before in ("{", ",")
            element |= before == "return" and tokens[begin - 2].text == ":"
            yield line, text, [member, *callees], before, element
            continue
        at += 1


def chained(tokens, at):
    """After a literal: where the next literal of its chain of `+` stands, or None."""
    if at >= len(tokens) or tokens[at].text != "+":
        return None
    depth = 0
    for index in range(at + 1, min(at + 60, len(tokens))):
        token = tokens[index]
        if token.kind == "string" and depth == 0:
            return index if tokens[index - 1].text == "+" else None
        if token.kind == "mark":
            if token.text in "([{":
                depth += 1
            elif token.text in ")]}":
                depth -= 1
            if depth < 0 or depth == 0 and token.text in ",;?:<=":
                return None
    return None


def messages_of_cpp(path, source):
    for line, text, callees, before, element in cpp_messages(source):
        if element and len(words(text)) < ELEMENT_WORDS or path == DOCTOR and "say" in callees:
            continue
        if NOT_SAID.isdisjoint(callees) and before not in ("[", "==") and is_message(text):
            yield Found(path, line, text, "")


def comments_of_cpp(path, source):
    lines = source.split("\n")
    block = None  # [line, mark, column, texts]
    for token in cpp_tokens(source):
        if token.kind == "block_comment":
            body = "\n".join(part.strip(" */") for part in token.text[2:-2].split("\n"))
            yield Found(path, token.line, body.strip(), "")
        if token.kind != "line_comment":
            continue
        here = lines[token.line - 1]
        column = here.rindex(token.text.split("\n")[0])
        mark = re.match(r"//[/!]?<?", token.text)[0]
        alone = here[:column].strip() == ""
        text = token.text[len(mark):].strip()
        if (block is not None and alone and block[1] == mark and block[2] == column
                and block[0] + len(block[3]) == token.line):
            block[3].append(text)
            continue
        if block is not None:
            yield from whole(path, block, lines)
        block = [token.line, mark, column, [text]]
    if block is not None:
        yield from whole(path, block, lines)


def whole(path, block, lines):
    """A block of comments, with the code on its first line, or else on the line after it."""
    line, texts = block[0], block[3]
    beside = lines[line - 1][:block[2]].strip()
    if not beside and line + len(texts) <= len(lines):
        beside = lines[line + len(texts) - 1].strip()
    while texts and (not texts[0] or DIRECTIVES.match(texts[0])):
        texts = texts[1:]
        line += 1
    if texts:
        yield Found(path, line, "\n".join(texts), beside)


def text_of(node):
    """What a Python expression says, or None where it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        if left is None and right is None:
            return None
        return (left if left is not None else "{}") + (right if right is not None else "{}")
    return None


def docstrings(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                yield first.value


def messages_of_python(path, tree):
    seen = {id(node) for node in docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "re":
            seen.update(id(part) for part in ast.walk(node))
    for node in ast.walk(tree):  # the outermost first
        if id(node) in seen:
            continue
        text = text_of(node)
        if text is None:
            continue
        seen.update(id(part) for part in ast.walk(node))
        if is_message(text):
            yield Found(path, node.lineno, text, "")


def before_line(source, number):
    lines = source.split("\n")
    return lines[number - 2].strip() if number > 1 else ""


def comments_of_python(path, source, tree):
    lines = source.split("\n")
    for node in docstrings(tree):
        text = "\n".join(line.strip() for line in node.value.strip().split("\n"))
        yield Found(path, node.lineno, text, before_line(source, node.lineno))
    block = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        text = token.string.lstrip("#:").strip()
        alone = token.line[:column].strip() == ""
        if block is not None and alone and block[2] == column and block[0] + len(block[3]) == line:
            block[3].append(text)
            continue
        if block is not None:
            yield from whole(path, block, lines)
        block = [line, "#", column, [text]]
    if block is not None:
        yield from whole(path, block, lines)


def begun(message):
    """The text as its user reads it, where its file names what it is about in one place."""
    folder, _, name = message.path.rpartition("/")
    files, beginning = BEGUN
    is_half = folder == "integrations/deepspeed" and name in files and re.match("[a-z]", message.text)
    return beginning + message.text if is_half else message.text


def population(root):
    """(messages, comments) of the tree, in the order of paths and lines."""
    messages, comments = [], []
    for top in TOP:
        for file in sorted((root / top).rglob("*")):
            path = file.relative_to(root).as_posix()
            if file.suffix in (".h", ".hpp", ".cc", ".cu"):
                source = file.read_text()
                messages += messages_of_cpp(path, source)
                comments += comments_of_cpp(path, source)
            elif file.suffix == ".py":
                source = file.read_text()
                tree = ast.parse(source)
                messages += messages_of_python(path, tree)
                comments += comments_of_python(path, source, tree)
    messages = [found._replace(text=begun(found)) for found in messages]
    comments = [found for found in comments if len(words(found.text)) >= COMMENT_WORDS]
    return sorted(messages), sorted(comments)


def show(title, drawn):
    print(f"== {title}")
    for number, found in enumerate(drawn, 1):
        text = found.text.strip("\n").replace("\n", "\n      ")
        print(f"{number:4d}  {found.path}:{found.line}" + (f"    | {found.beside}" if found.beside else "") + f"\n      {text}")


def main():
    parser = argparse.ArgumentParser(description="Draw messages and comments at random, for a reader who judges them.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--messages", type=int, default=60)
    parser.add_argument("--comments", type=int, default=60)
    parser.add_argument("--all", action="store_true", help="print the whole population and draw nothing")
    options = parser.parse_args()
    messages, comments = population(options.root)
    if not options.all:
        # Each from the seed: what is drawn of one does not depend on the other.
        messages = random.Random(options.seed).sample(messages, options.messages)
        comments = random.Random(options.seed).sample(comments, options.comments)
    show(f"{len(messages)} messages", messages)
    show(f"{len(comments)} comments", comments)


if __name__ == "__main__":
    main()
