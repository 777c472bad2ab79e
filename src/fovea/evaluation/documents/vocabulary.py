"""Random names, numbers, dates and sentences for documents. No value belongs to a real person or company."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from random import Random


def listed(text: str, between: str | None = None) -> list[str]:
    """The words of a text, or its parts between the given separator."""
    return text.split(between)


ONSETS = listed(
    "b c d f g h j k l m n p r s t v w z br ch cl cr dr fl fr gl gr kr pl pr qu sc sh sk sl sm sn sp st "
    "str sw th tr tw"
)
VOWELS = listed("a e i o u a e i o u ai ea ee ia ie io oa oo ou ei au y")
CODAS = ["", "", "", *listed("n r s t l m d k p ck ll nd ng nt rd rk rn rs rt sh ss st th x z ff mp lt")]
WORDS = listed(
    "the of and to in is for on that with by it as are was this at from be have an not or which one all "
    "were there their has been more when will would no out up into than them can only other time new "
    "some could these two may first then do any like my now over such our man me even most made after "
    "also did many off before must well back through years much where your way down should because long "
    "each just state those people too how little good world make very year still see own work men day "
    "get here between both life being under three never know same last another while us might great go "
    "come since against right came take used himself few house use place during high without again home "
    "around small however found part thought went say once general upon school every does got united "
    "left number course war until always away something fact water though less public put think almost "
    "hand enough far took head yet better display set told nothing night end why called didn eyes find "
    "going look asked later knew point next program city business give group toward days young let room "
    "side social given present several order national second possible rather per face among form "
    "important often things looked early white case become large need big four within felt along "
    "children saw best church ever least power development seemed light thing family interest area "
    "turned others open want service members mind help country whole problem kind began different door "
    "line report invoice price market customer product delivery value study energy river winter summer "
    "machine engine garden paper letter office window table bridge train station morning evening "
    "station budget method result change growth measure sample figure section chapter account payment "
    "total amount period quality control design network storage memory vision signal pattern texture "
    "region detail surface glass metal"
)
PRODUCTS = listed(
    "chair desk lamp cable monitor keyboard mouse printer paper notebook pencil folder stapler phone "
    "tablet router switch adapter battery charger speaker camera tripod lens filter bag box tape glue "
    "brush paint ladder drill hammer screw bolt nut washer pipe valve pump hose tank wheel tyre belt "
    "chain sensor relay fuse bulb socket plug coffee tea sugar milk bread butter cheese apple orange "
    "banana tomato potato onion rice pasta soup salad water juice wine beer soap towel plate cup fork "
    "knife spoon bowl pan pot shirt jacket shoe sock glove hat scarf blanket pillow carpet curtain "
    "mirror clock frame vase candle basket shelf drawer cabinet sofa stool bench door handle key lock"
)
ADJECTIVES = listed(
    "red blue green black white grey large small long short round flat light heavy steel wooden plastic "
    "paper cotton leather glass digital manual mini maxi basic classic premium office garden travel "
    "kitchen double single"
)
STREETS = listed("Street Road Lane Avenue Way Square Hill Drive Court Gate")
ENDINGS = [
    "Ltd",
    "Inc.",
    "GmbH",
    "& Sons",
    "Group",
    "AG",
    "LLC",
    "Partners",
    "Co.",
    "Trading",
    "Systems",
    "Services",
    "Works",
    "Labs",
    "Foods",
    "Supply",
]
MONTHS = listed("January February March April May June July August September October November December")
DOMAINS = listed("example.com example.org example.net mail.example shop.example")
PUNCTUATION = ".,:;!?%&/()-+#'\"*=@_€$£"


@dataclass(frozen=True, slots=True)
class Locale:
    """How one document writes money and dates.

    currency: symbol or code; `before`: whether it stands before the number.
    thousands, decimal: separators.
    day: format of dates: an index into `FORMATS`.
    """

    currency: str
    before: bool
    thousands: str
    decimal: str
    day: int

    def amount(self, cents: int) -> str:
        """An amount of money with its currency."""
        number = self.number(cents)
        if not self.currency:
            return number
        if self.before:
            return f"{self.currency}{number}" if len(self.currency) == 1 else f"{self.currency} {number}"
        return f"{number} {self.currency}"

    def number(self, cents: int) -> str:
        """An amount of money without its currency."""
        sign, cents = ("-" if cents < 0 else ""), abs(cents)
        return f"{sign}{self.count(cents // 100)}{self.decimal}{cents % 100:02d}"

    def count(self, value: int) -> str:
        """A whole number, grouped in thousands."""
        return f"{value:,}".replace(",", self.thousands)

    def date(self, day: date) -> str:
        """A date."""
        return FORMATS[self.day](day)


FORMATS = (
    lambda d: d.isoformat(),
    lambda d: f"{d.day:02d}.{d.month:02d}.{d.year}",
    lambda d: f"{d.day:02d}/{d.month:02d}/{d.year}",
    lambda d: f"{d.day} {MONTHS[d.month - 1]} {d.year}",
    lambda d: f"{MONTHS[d.month - 1]} {d.day}, {d.year}",
    lambda d: f"{d.day} {MONTHS[d.month - 1][:3]} {d.year}",
    lambda d: f"{MONTHS[d.month - 1][:3]} {d.day}, {d.year}",
    lambda d: f"{d.month}/{d.day}/{d.year}",
)


def locale(rng: Random) -> Locale:
    """A random way to write money and dates."""
    currency, before = rng.choice(
        (
            ("$", True),
            ("€", True),
            ("€", False),
            ("£", True),
            ("USD", True),
            ("EUR", False),
            ("CHF", True),
            ("", True),
        )
    )
    thousands, decimal = rng.choice(((",", "."), (",", "."), (".", ","), ("", "."), (" ", ","), ("'", ".")))
    return Locale(currency, before, thousands, decimal, rng.randrange(len(FORMATS)))


def syllable(rng: Random) -> str:
    return rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)


def name(rng: Random) -> str:
    """A made-up proper name of one to three syllables."""
    return "".join(syllable(rng) for _ in range(rng.choice((1, 2, 2, 2, 3))))[:11].capitalize()


def person(rng: Random) -> str:
    first, last = name(rng), name(rng)
    return rng.choice((f"{first} {last}", f"{first} {last}", f"{first[0]}. {last}", f"{last}, {first}"))


def company(rng: Random) -> str:
    return f"{name(rng)} {rng.choice(ENDINGS)}" if rng.random() < 0.8 else f"{name(rng)} & {name(rng)}"


def street(rng: Random) -> str:
    if rng.random() < 0.5:
        return f"{rng.randint(1, 240)} {name(rng)} {rng.choice(STREETS)}"
    return f"{name(rng)}{rng.choice(('strasse', 'weg', ' Allee', ' Platz'))} {rng.randint(1, 180)}"


def city(rng: Random) -> str:
    return (
        f"{rng.randint(1000, 99999)} {name(rng)}"
        if rng.random() < 0.6
        else f"{name(rng)} {code(rng, 'A9 9A')}"
    )


def code(rng: Random, pattern: str) -> str:
    """A code after a pattern: 9 is a digit, A a capital letter, a a small one; everything else stays."""
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    draw = {"9": "0123456789", "A": letters, "a": letters.lower()}
    return "".join(rng.choice(draw[sign]) if sign in draw else sign for sign in pattern)


def number_code(rng: Random) -> str:
    """A number of an invoice, an order, a customer."""
    return code(
        rng,
        rng.choice(
            (
                "999999",
                "9999-999",
                "AA-99999",
                "AAA-9999-99",
                "A9999999",
                "2026-99999",
                "2025/9999",
                "99-9999-A",
                "AA 999 999",
            )
        ),
    )


def phone(rng: Random) -> str:
    return code(
        rng,
        rng.choice(("+49 999 999999", "(999) 999-9999", "999-999-9999", "+44 9999 999999", "0999 9999999")),
    )


def email(rng: Random) -> str:
    return f"{name(rng).lower()}@{rng.choice(DOMAINS)}"


def day(rng: Random) -> date:
    return date(2018, 1, 1) + timedelta(days=rng.randrange(3650))


def clock(rng: Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"


def product(rng: Random) -> str:
    noun = rng.choice(PRODUCTS)
    text = noun if rng.random() < 0.25 else f"{rng.choice(ADJECTIVES)} {noun}"
    if rng.random() < 0.2:
        text += " " + code(rng, rng.choice(("A9", "99", "AA9", "9 kg", "99 cm", "A4")))
    return text[0].upper() + text[1:]


def word(rng: Random) -> str:
    """One word of running text: mostly a common one, sometimes a made-up one or a number."""
    chance = rng.random()
    if chance < 0.62:
        return rng.choice(WORDS)
    if chance < 0.72:
        return rng.choice(PRODUCTS)
    if chance < 0.87:
        return name(rng).lower()
    if chance < 0.93:
        return name(rng)
    if chance < 0.96:
        return junk(rng)
    return str(rng.randint(0, 10 ** rng.randint(1, 5)))


def sentence(rng: Random, low: int = 5, high: int = 13) -> str:
    """A sentence of random words. It means nothing, so that it can only be read, not guessed."""
    words = [word(rng) for _ in range(rng.randint(low, high))]
    for index in range(1, len(words) - 1):
        if rng.random() < 0.07:
            words[index] += rng.choice((",", ",", ";", ":"))
    words[0] = words[0][0].upper() + words[0][1:]
    return " ".join(words) + rng.choice("......?!")


def heading(rng: Random) -> str:
    """A title of two to five words."""
    words = [word(rng) for _ in range(rng.randint(2, 5))]
    text = " ".join(words)
    return text.title() if rng.random() < 0.5 else text[0].upper() + text[1:]


def junk(rng: Random) -> str:
    """A string of random signs, so that every character is met in every neighbourhood."""
    signs = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789" + PUNCTUATION
    return "".join(rng.choice(signs) for _ in range(rng.randint(1, 9)))
