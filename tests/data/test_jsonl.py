import pytest

from redco_cli.data.jsonl import line_of, read_jsonl
from redco_cli.errors import DataError

REMEDY = 'write one JSON object per line, such as {"text": "..."}, in UTF-8'


def test_objects_are_read_in_order_and_blank_lines_skipped(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"b": [1, null], "t": "\xc3\xa9\xe2\x80\xa8x"}\n{"a": {"c": true}}'
    )
    assert read_jsonl(path) == [{"a": 1}, {"b": [1, None], "t": "é\u2028x"}, {"a": {"c": True}}]


@pytest.mark.parametrize(
    ("line", "problem", "remedy"),
    [
        (b'{"a": 1', "not JSON: Expecting ',' delimiter at column 8", REMEDY),
        (b"a prompt", "not JSON: Expecting value at column 1", REMEDY),
        (b'{"a": 1} {"a": 2}', "not JSON: Extra data at column 10", REMEDY),
        (b"[1, 2]", "holds a list, but an object is expected", REMEDY),
        (b'"text"', "holds text, but an object is expected", REMEDY),
        (b"null", "holds null, but an object is expected", REMEDY),
        (b"true", "holds true or false, but an object is expected", REMEDY),
        (b"3", "holds a number, but an object is expected", REMEDY),
        (b'{"a": "\xe9"}', "not UTF-8: byte 0xe9 at position 7 of the line", "save the file as UTF-8"),
        (
            b"[" * 100_000,
            "not readable as JSON: maximum recursion depth exceeded while decoding a JSON array from a unicode string",
            REMEDY,
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, problem, remedy):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"a": 0}\n\n' + line + b'\n{"a": 2}\n')
    with pytest.raises(DataError) as error:
        read_jsonl(path)
    assert str(error.value) == f"{path}:3: {problem}\n  -> {remedy}"


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_an_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(DataError) as error:
        read_jsonl(path)
    assert str(error.value) == f"{path}: holds no examples\n  -> {REMEDY}"


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    with pytest.raises(DataError) as error:
        read_jsonl(tmp_path / "none.jsonl")
    assert str(error.value) == f"{tmp_path}/none.jsonl: cannot be read: No such file or directory\n  -> check the path"
    with pytest.raises(DataError) as error:
        read_jsonl(tmp_path)
    assert str(error.value) == f"{tmp_path}: cannot be read: Is a directory\n  -> check the path"


def test_objects_know_their_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"a": 1}\n\n \n{"a": 2}\n')
    objects = read_jsonl(path)
    assert [objects.place(index) for index in range(2)] == [f"{path}:2", f"{path}:5"]
    assert [line_of(str(path), number) for number in range(3)] == [(2, None), (5, None), (None, 2)]
    path.write_text('[{"a": 1}]')
    assert line_of(str(path), 0) == (None, None)
    assert line_of(str(tmp_path / "gone.jsonl"), 0) == (None, None)
