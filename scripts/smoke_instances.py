"""The instances of src/understudy/data/smoke.jsonl: what make_smoke.py makes its rows of."""

from __future__ import annotations

from msgspec import Struct


class Change(Struct, frozen=True):
    """`old`, which stands once in the file, becomes `new`; an empty `old` means that `new` is put at the end."""

    path: str
    old: str
    new: str


class Instance(Struct, frozen=True):
    """One instance: its package, what its issue says, and the changes of the fix and of the tests."""

    package: str
    number: int
    statement: str
    fix: tuple[Change, ...]
    tests: tuple[Change, ...]


INSTANCES = (
    Instance(
        "inflection",
        1,
        """\
camelize fails on an empty string when the first letter is to be lower case

`inflection.camelize("")` gives `""`, but `inflection.camelize("", False)` ends with

    IndexError: string index out of range

An empty string should come back as it is in both cases.
""",
        (
            Change(
                "inflection/__init__.py",
                "        return string[0].lower() + camelize(string)[1:]\n",
                "        return string[:1].lower() + camelize(string)[1:]\n",
            ),
        ),
        (
            Change(
                "test_inflection.py",
                "def test_camelize_with_underscores():\n",
                """\
@pytest.mark.parametrize("uppercase_first_letter", [True, False])
def test_camelize_keeps_an_empty_string(uppercase_first_letter):
    assert inflection.camelize("", uppercase_first_letter) == ""


def test_camelize_with_lower_takes_one_letter():
    assert inflection.camelize("A", False) == "a"


def test_camelize_with_underscores():
""",
            ),
        ),
    ),
    Instance(
        "toolz",
        1,
        """\
tail(0, seq) gives the whole sequence

The last zero elements of a sequence are none, and for an iterator that is what comes:

    >>> list(tail(0, iter([1, 2, 3])))
    []

With a list, a tuple or a string it is everything instead:

    >>> tail(0, [1, 2, 3])
    [1, 2, 3]

`tail(0, seq)` should be empty for every kind of sequence, and of the sequence's own type where it can be sliced,
as for other numbers.
""",
        (
            Change(
                "toolz/itertoolz.py",
                "        return seq[-n:]\n",
                "        return seq[-n:] if n else seq[:0]\n",
            ),
        ),
        (
            Change(
                "toolz/tests/test_itertoolz.py",
                "    assert list(tail(2, (3, 2, 1))) == list((2, 1))\n",
                """\
    assert list(tail(2, (3, 2, 1))) == list((2, 1))


def test_tail_of_no_elements():
    assert tail(0, [1, 2, 3]) == []
    assert tail(0, (1, 2, 3)) == ()
    assert tail(0, 'ABC') == ''


def test_tail_of_no_elements_of_an_iterator():
    assert list(tail(0, iter('ABC'))) == []
""",
            ),
        ),
    ),
    Instance(
        "toolz",
        2,
        """\
update_in and assoc_in let StopIteration out when there are no keys

    >>> assoc_in({'a': 1}, [], 2)
    Traceback (most recent call last):
      ...
    StopIteration

A StopIteration that leaves a function ends a generator around it in silence (or as a RuntimeError far from the
cause). There is no place to change without keys, so both functions should raise a ValueError that names `keys`.
""",
        (
            Change(
                "toolz/dicttoolz.py",
                "    ks = iter(keys)\n    k = next(ks)\n\n    rv = inner = factory()\n",
                """\
    ks = iter(keys)
    try:
        k = next(ks)
    except StopIteration:
        raise ValueError("keys must have at least one element") from None

    rv = inner = factory()
""",
            ),
        ),
        (
            Change(
                "toolz/tests/test_dicttoolz.py",
                "",
                """\


def test_update_in_needs_a_key():
    for keys in ([], (), iter([])):
        try:
            update_in({'a': 1}, keys, inc)
        except ValueError as error:
            assert 'keys' in str(error)
        else:
            assert False, 'no error without keys'


def test_assoc_in_needs_a_key():
    try:
        assoc_in({'a': 1}, [], 2)
    except ValueError as error:
        assert 'keys' in str(error)
    else:
        assert False, 'no error without keys'
""",
            ),
        ),
    ),
    Instance(
        "boltons",
        1,
        """\
daterange cannot step by months from the end of a month

    >>> from boltons.timeutils import daterange
    >>> list(daterange(date(2020, 1, 31), date(2020, 5, 31), step=(0, 1, 0)))
    Traceback (most recent call last):
      ...
    ValueError: day is out of range for month

Where a month is too short, its last day should be taken. When the step has no days, later months go back to the
day of *start*: the example gives January 31, February 29, March 31 and April 30. The same holds for steps of years
from the 29th of February. A step that has days as well goes on from the day that was taken.
""",
        (
            Change("boltons/timeutils.py", "import re\n", "import re\nimport calendar\n"),
            Change(
                "boltons/timeutils.py",
                """\
            cur = cur.replace(year=cur.year + m_y_step,
                              month=(cur_month + 1))
""",
                """\
            year, month = cur.year + m_y_step, cur_month + 1
            day = cur.day if d_step else start.day
            cur = cur.replace(year=year, month=month,
                              day=min(day, calendar.monthrange(year, month)[1]))
""",
            ),
        ),
        (
            Change(
                "tests/test_timeutils.py",
                "",
                """\


def test_daterange_months_from_the_end_of_a_month():
    found = list(daterange(date(2020, 1, 31), date(2020, 5, 31), step=(0, 1, 0)))
    assert found == [date(2020, 1, 31), date(2020, 2, 29), date(2020, 3, 31), date(2020, 4, 30)]


def test_daterange_months_back_from_the_end_of_a_month():
    found = list(daterange(date(2021, 5, 31), date(2021, 1, 1), step=(0, -1, 0)))
    assert [day.day for day in found] == [31, 30, 31, 28, 31]


def test_daterange_years_from_a_leap_day():
    found = list(daterange(date(2020, 2, 29), date(2025, 1, 1), step=(1, 0, 0)))
    assert [day.day for day in found] == [29, 28, 28, 28, 29]


def test_daterange_months_and_days():
    found = list(daterange(date(2021, 1, 30), date(2021, 4, 1), step=(0, 1, 1)))
    assert found == [date(2021, 1, 30), date(2021, 3, 1)]
""",
            ),
        ),
    ),
    Instance(
        "boltons",
        2,
        """\
parse_timedelta takes months for minutes

    >>> from boltons.timeutils import parse_timedelta
    >>> parse_timedelta('1 month')
    datetime.timedelta(seconds=60)

Months are no unit that it knows. `mo`, `month` and `months` should raise a ValueError with the unit in its
message, as other unknown units do (`'2 fortnights'`). `m`, `min`, `mins`, `minute` and `minutes` remain minutes.
""",
        (
            Change(
                "boltons/timeutils.py",
                "    for match in _PARSE_TD_RE.finditer(text):\n"
                "        value, unit = match.group('value'), match.group('unit')\n",
                "    for match in _PARSE_TD_RE.finditer(text):\n"
                "        value, unit = match.group('value'), match.group('unit')\n"
                "        if match.group('word').startswith('mo'):\n"
                "            unit = match.group('word')  # else months would be minutes\n",
            ),
            Change(
                "boltons/timeutils.py",
                r"""\s*(?P<unit>\w)\w*)" % _FLOAT_PATTERN)""",
                r"""\s*(?P<word>(?P<unit>\w)\w*))" % _FLOAT_PATTERN)""",
            ),
        ),
        (
            Change(
                "tests/test_timeutils.py",
                "from boltons.timeutils import daterange, isoparse, Eastern\n",
                "from boltons.timeutils import daterange, isoparse, parse_timedelta, Eastern\n",
            ),
            Change(
                "tests/test_timeutils.py",
                "",
                """\


def test_parse_timedelta_knows_no_months():
    for text in ('1mo', '1 month', '2 days 3 months'):
        try:
            found = parse_timedelta(text)
        except ValueError as error:
            assert 'mo' in str(error)
        else:
            assert False, f'{text} is {found}'


def test_parse_timedelta_minutes():
    for text in ('2m', '2 min', '2 mins', '2 minute', '2 minutes'):
        assert parse_timedelta(text) == timedelta(minutes=2)
""",
            ),
        ),
    ),
)
