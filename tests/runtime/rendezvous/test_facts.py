"""What processes must have alike: compared by digests, and named by each from its own copy."""

import time

import pytest

from redco_cli.recipe.schema import Recipe
from redco_cli.runtime.peers.messages import TO_PROCESS, decode, encode
from redco_cli.runtime.rendezvous.facts import compared, differences, differing, digests, shown_value

SECRET = b"0123456789abcdef"


def told(mine, theirs, secret=SECRET):
    """What two processes say, the first of them process 0."""
    keys, more = differing(theirs, secret, digests(mine, secret).table)
    found = [(1, keys, more)]
    return [differences(known, secret, process, found) for process, known in enumerate((mine, theirs))]


def test_equal_facts_have_equal_digests_in_any_order():
    one, two = (
        {"jax": "1", "recipe a": [1, {"x": 2}], "devices": 2},
        {"devices": 2, "recipe a": [1, {"x": 2}], "jax": "1"},
    )
    assert digests(one, SECRET) == digests(two, SECRET)
    assert differing(one, SECRET, digests(two, SECRET).table) == ([], 0)


@pytest.mark.parametrize("value", [1, 1.0, "1", None, [1], True])
def test_every_value_counts_with_its_type(value):
    others = [other for other in (1, 1.0, "1", None, [1], True) if repr(other) != repr(value)]
    assert {digests({"x": other}, SECRET).whole for other in others}.isdisjoint({digests({"x": value}, SECRET).whole})


def test_digests_tell_nothing_without_the_secret():
    """Nor that two keys have one value."""
    found = digests({"recipe a": 0, "recipe b": 0}, SECRET)
    assert len({*found.table, *found.table.values()}) == 4
    other = digests({"recipe a": 0, "recipe b": 0}, SECRET[::-1])
    assert {*found.table, *found.table.values(), found.whole}.isdisjoint(
        {*other.table, *other.table.values(), other.whole}
    )


def test_devices_that_one_does_not_know_of_are_no_difference():
    unknown, two, four = ({"devices": count, "x": 1} for count in (None, 2, 4))
    assert digests(unknown, SECRET).whole == digests(two, SECRET).whole == digests(four, SECRET).whole
    assert digests(unknown, SECRET).devices is None
    assert digests(two, SECRET).devices != digests(four, SECRET).devices
    for one, other in ((unknown, two), (two, unknown)):
        assert differing(one, SECRET, digests(other, SECRET).table) == ([], 0)
    assert "devices is 2 here, but not on process 1" in told(two, four)[0]


def test_each_tells_its_own_values():
    first, second = told({"recipe seed": 0, "recipe a": "x"}, {"recipe seed": 1, "recipe a": "y"})
    assert (
        first
        == "the processes differ: recipe seed is 0 here, but not on process 1, recipe a is x here, but not on process 1"
    )
    assert (
        second
        == "the processes differ: recipe seed is 1 here, but not on process 0, recipe a is y here, but not on process 0"
    )


def test_what_only_one_has_is_told_by_it():
    first, second = told({}, {"recipe seed": 1})
    assert first == "the processes differ: process 1 has a key that is not there on this process"
    assert second == "the processes differ: recipe seed is 1 here, but not on process 0"
    first, second = told({"recipe seed": 1}, {})
    assert first == "the processes differ: recipe seed is 1 here, but not on process 1"
    assert second == "the processes differ: process 0 has a key that is not there on this process"


def test_a_few_are_named_and_the_others_counted():
    first, second = told({f"recipe {n}": 0 for n in range(9)}, {f"recipe {n}": 1 for n in range(9)})
    assert first.count("is 0 here") == second.count("is 1 here") == 3
    assert first.endswith(", and 6 more")
    assert second.endswith(", and 6 more")


def test_of_several_each_hears_first_of_itself():
    known = [{"seed": 0}, {"seed": 1}, {"seed": 0}, {"seed": 2}]
    table = digests(known[0], SECRET).table
    found = [(process, *differing(known[process], SECRET, table)) for process in (1, 3)]
    texts = [differences(mine, SECRET, process, found) for process, mine in enumerate(known)]
    agreeing = "the processes differ: seed is 0 here, but not on process 1, seed is 0 here, but not on process 3"
    assert texts[0] == texts[2] == agreeing
    assert (
        texts[1] == "the processes differ: seed is 1 here, but not on process 0; process 3 differs from process 0 too"
    )


def test_a_process_that_could_not_say_in_what_it_differs():
    assert differences({}, SECRET, 1, [(1, (), 0)]) == "the processes differ: this process and process 0"
    assert differences({}, SECRET, 0, [(1, (), 0)]) == "the processes differ: this process and process 1"


@pytest.mark.parametrize(
    "name",
    ["recipe plugin.options.api_key", "recipe plugin.options.token", "recipe data.hf-secret", "recipe DB_PASSWORD"],
)
def test_values_whose_name_says_so_are_not_shown(name):
    assert shown_value(name, "s3cret") == "a value that is not shown"
    assert "s3cret" not in "".join(told({name: "s3cret"}, {name: "s3cret2"}))


@pytest.mark.parametrize(
    "name", ["recipe model.tokenizer", "recipe data.max_tokens_per_batch", "recipe monkey", "seed"]
)
def test_other_values_are_shown_cut(name):
    assert shown_value(name, "x" * 100) == "x" * 60 + "..."
    assert shown_value(name, [1, 2]) == "[1, 2]"


def test_the_digests_of_ten_thousand_labels_fit_and_are_quick():
    labels = {f"recipe model.config.id2label.{n}": f"label number {n}, with a long description" for n in range(10_000)}
    began = time.monotonic()
    found = digests(labels, SECRET)
    message = encode({"op": "compare", "facts": dict(found.table)})
    decode(message, TO_PROCESS)
    changed = labels | {"recipe model.config.id2label.77": "another"}
    assert "id2label.77 is another here, but not on process 0" in told(labels, changed)[1]
    assert time.monotonic() - began < 5


def test_secrets_are_compared_where_a_secret_of_the_run_keys_the_digests_and_never_shown():
    def known(secret, **options):
        recipe = Recipe.model_validate({"plugin": {"module": "p", "options": options}, "output_dir": "x"})
        plugin = compared(recipe, secret)["plugin"]
        return {f"recipe plugin.options.{name}": value for name, value in plugin["options"].items()}

    one, other = {"api_key": "s3cr3t-1", "a": [{"token": 12345}]}, {"api_key": "s3cr3t-2", "a": [{"token": 54321}]}
    for said in told(known(SECRET, **one), known(SECRET, **other)):
        assert "recipe plugin.options.api_key is a value that is not shown here" in said
        assert "recipe plugin.options.a is a value that is not shown here" in said
        assert not any(value in said for value in ("s3cr3t", "12345", "54321"))
    assert known(b"", **one) == known(b"", **other)
    assert told(known(b"", label_key="x"), known(b"", label_key="y"))[0].count("label_key is x here") == 1
