"""The questions for a pretrained decoder: conversation, summaries, JSON and code.

Each question has an earlier one about the same thing in other words. Its answer is what the drafter `answers`
knows of it.
"""

from __future__ import annotations

from typing import NamedTuple


class Pair(NamedTuple):
    """A question, and the one that was asked before."""

    kind: str
    earlier: str
    question: str


TEXTS = (
    """\
The town library of Harnby will close for eleven weeks from the second of March. The heating pipes, \
which are older than the building's present roof, leak in four places, and the engineers found lead in \
the joints. The council has set aside 410,000 pounds for new pipes, new radiators and a heat pump.

During the closure, readers can borrow books from a van that stands on the market square on Tuesdays and \
Saturdays between nine and four. The van holds about 2,500 books, half of them for children. Books that \
were borrowed before the closure need not be returned until the library opens again, and no fines are \
charged.

The reading room for local newspapers moves to the school hall on Mill Lane. It will be open only on \
Thursday afternoons, because the school needs the hall on all other days. Visitors are asked to come by \
foot or by bicycle, as there is no place to park.

The council expects that the new heating will use a third of the energy. If the work is finished early, \
the library will open before Easter with a week of readings for children.""",
    """\
Rain barrels are a simple way to water a garden. A roof of fifty square metres collects about forty \
litres from each millimetre of rain, so that a single storm can fill a barrel of two hundred litres. The \
water is soft, and most plants prefer it to water from the tap.

A barrel should stand on a firm base that is high enough for a can to fit under the tap. Bricks are \
often used, but concrete slabs are safer, because a full barrel weighs as much as three grown men. A lid \
keeps out leaves, and it keeps out mosquitoes, which lay their eggs in open water.

In winter the barrel should be emptied before the first hard frost. Ice needs more room than water, and \
it splits plastic as easily as wood. The pipe from the gutter is turned away, so that rain and melted \
snow run into the drain.

Water from a barrel is not for drinking. Birds leave droppings on roofs, and old roofs may contain \
copper or lead. On vegetables it should be poured on the soil and not on the leaves.""",
    """\
The night train from Oslen to Vara returns in December after nine years. It leaves at 21:40 and arrives \
at 7:15, with stops in Lund and Brask. Tickets cost between 39 and 129 crowns; the cheaper ones are for \
seats, the dearer ones for a bed in a cabin of two.

The railway had stopped the train because flights were cheaper and the carriages were worn out. Since \
then, the number of flights between the two cities has fallen by a third, while the day trains are full \
on most Fridays. A survey of 6,000 passengers found that seven of ten would travel by night if the price \
was right.

The twelve carriages were bought from a company that went bankrupt before it ran its first train. They \
have showers, and a car in which breakfast is served from six o'clock. Bicycles can be taken along, but \
only eight at a time, so a place has to be booked.

If more than sixty percent of the beds are sold by the summer, a second train will follow, from Oslen to \
the coast.""",
    """\
Bread dough rises because yeast turns sugar into gas. The gas is held by gluten, a net of proteins that \
forms when flour and water are mixed. Kneading makes the net stronger, and time does the same: a wet \
dough that rests overnight needs hardly any kneading.

Salt slows the yeast and makes the net tighter. Without salt the dough rises fast and falls again, and \
the bread tastes flat. Most bakers use two grams of salt for a hundred grams of flour. Sugar is not \
needed, because enzymes in the flour make enough of it from starch.

Temperature matters more than anything else. At thirty degrees a dough is ready after an hour; at five \
degrees in a refrigerator it takes a day. The slow dough has more taste, since bacteria have time to \
make acids.

In the oven the gas expands, and the dough grows by a third within ten minutes. Then the crust sets and \
stops it. Steam keeps the crust soft for longer, which is why bakers throw a cup of water into the hot \
oven.""",
    """\
The harbour of Pellan wants to be free of diesel by 2031. Its four cranes already run on electricity, \
but the eleven tugs and forty trucks do not. Together they burn nine hundred thousand litres a year, and \
the neighbours have complained about soot on their windows since the second terminal was opened.

The first electric tug was delivered in April. It pulls as hard as the old ones, works for four hours, \
and is charged within ninety minutes. Its captain says that she can now talk to her crew without \
shouting. A second tug has been ordered, and three more will follow if the batteries keep what the maker \
has promised.

The trucks are harder. They work in two shifts, so there is no time to charge them. The harbour will try \
batteries that are changed in five minutes by a robot. Two stations are being built, for 3.2 million \
euros, of which the state pays a half.

Ships at the quay will get power from the land from next year on. Until now they have run their engines \
day and night.""",
    """\
A survey of the peat bog at Lower Fenn has found 214 kinds of moth, nineteen more than ten years ago. \
Two of them had not been seen in the county since 1951. The volunteers set up white sheets with lamps on \
thirty nights between May and September, and let every animal go after it was counted.

The bog was drained in the last century to cut peat for gardens. In 2009 the county bought it and \
blocked the ditches with planks and heather bales. The water rose by forty centimetres within three \
winters, and the moss came back, first at the edges and then in the middle.

Wet peat stores carbon, while dry peat gives it off. The county estimates that the bog now keeps as much \
carbon out of the air as six hundred cars produce. That was not the first aim of the work, but it has \
brought money from a fund for the climate.

Visitors can walk on a new path of oak boards, two kilometres long. Dogs must be on a lead, because \
nightjars breed on the ground.""",
)
CHAT = (
    (
        "How do I remove a coffee stain from a shirt?",
        "How do I get coffee stains out of a shirt?",
    ),
    ("Why is the sky blue?", "Can you explain to me why the sky looks blue?"),
    ("Give me three tips for sleeping better.", "I sleep badly. What are three things that I can do?"),
    ("What is the difference between a lake and a pond?", "How do lakes differ from ponds?"),
    ("How do I learn to play the guitar?", "I would like to play the guitar. How should I begin?"),
    ("Why do leaves turn red in autumn?", "What makes the leaves of trees red in autumn?"),
)
JSON = (
    (
        "List five countries of Europe as a JSON array of objects with name and capital.",
        "Write a JSON array with six countries of Europe. Each object has name and capital.",
    ),
    (
        "Write a JSON object for a book with title, author, year and a list of chapters.",
        "Describe a book as JSON with the keys title, author, year and chapters.",
    ),
    (
        "Give the days of the week as a JSON array of objects with name, number and weekend.",
        "Write JSON: an array of the seven days, each with name, number and weekend (true or false).",
    ),
    (
        "Write a JSON object with the settings of a web server: host, port, timeouts and log files.",
        "Show a configuration of a web server as JSON with host, port, timeouts and log files.",
    ),
    (
        "List four planets as JSON objects with name, diameter_km and moons.",
        "Write a JSON array of five planets with the keys name, diameter_km and moons.",
    ),
    (
        "Write a shopping list as JSON: items with name, quantity and unit.",
        "Give me a JSON array of groceries. Each one has name, quantity and unit.",
    ),
)
CODE = (
    (
        "Write a Python function that merges two sorted lists.",
        "Write a function in Python that takes two sorted lists and returns one sorted list.",
    ),
    (
        "Write a Python function that checks whether a string is a palindrome.",
        "Write Python code that tells whether a word reads the same backwards.",
    ),
    (
        "Write a Python class for a stack with push, pop and peek.",
        "Show me a stack in Python as a class, with the methods push, pop and peek.",
    ),
    (
        "Write a Python function that counts the words of a text.",
        "Write a function in Python that returns how often each word occurs in a text.",
    ),
    (
        "Write a Python function that computes the Fibonacci numbers up to n.",
        "Write Python code that returns a list of the first n Fibonacci numbers.",
    ),
    (
        "Write a Python function that reads a CSV file and returns a list of dictionaries.",
        "How do I read a CSV file into a list of dictionaries in Python? Write a function.",
    ),
)
PAIRS = (
    *(Pair("chat", *pair) for pair in CHAT),
    *(
        Pair("summary", f"What is this text about?\n\n{text}", f"Summarize the following text.\n\n{text}")
        for text in TEXTS
    ),
    *(Pair("json", *pair) for pair in JSON),
    *(Pair("code", *pair) for pair in CODE),
)
