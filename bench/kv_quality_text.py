"""What kv_quality reads when no other text is given: written for it, so no model knows it."""

from __future__ import annotations

_LINES = """
The ferry at Hallow Point crosses the river eleven times a day, and has done so, with pauses for
ice and for two wars, since before anyone in the village can say. It is not a large boat. Six cars
fit on its deck if their drivers are polite, and perhaps thirty people can stand along the rails
when the wind is kind. The crossing takes nine minutes. Most of those who use it every morning have
stopped seeing the water at all; they read, or they look at the far bank and think about what waits
for them there.

My grandmother kept the accounts of the ferry for forty years. She did it in a narrow office above
the landing, with a stove that smoked and a window that had been painted shut, and she did it by
hand long after the bank in town had begun to send its statements by machine. Every fare was a
line. Every line had a date, a name if she knew it, a number of wheels and a number of feet, and in
the last column the amount. When the day was over she added the column from the top to the bottom,
wrote the sum in pencil, and then added it again from the bottom to the top. Only when the two sums
agreed did she write the result in ink. "One sum is an opinion," she used to say. "Two sums are a
fact."

I asked her once whether the two had ever differed. She laughed and said that they differed about
twice a month, and that this was the whole point. A sum that is never wrong has never been checked.
She did not think of herself as careless, and she was not; she thought of mistakes the way a
gardener thinks of weeds, as something that the ground makes by itself, and that asks for nothing
but regular attention. What she could not stand was a mistake that had been found and covered over.
In the spring when I was nine, a new pilot brought the boat in too fast and cracked a plank of the
landing. He nailed a board across it before anyone came. She saw the new nails within the hour. He
was not sent away for the plank, as the story is sometimes told. He was sent away for the board.

The river is wide there, and slow, and the color of tea. In summer the level falls until the
sandbars show their backs, and then the pilots steer by marks that are not on any map: the dead
elm, the gap between two barns, the place where the telephone wire sags. In winter the fog comes up
so thick that the bow cannot be seen from the wheel. On such mornings the ferry does not guess. A
bell hangs on each bank, and the keeper of the far bell must ring an answer before the boat lets go
of its ropes. If no answer comes, the boat stays where it is. People grumble, and some of them walk
the four miles to the bridge. But nobody has drowned in the fog at Hallow Point, and on the old
bridge, which has no bell, three people have.

There was a time when the county wanted to replace the ferry with a second bridge. Engineers came
and put small flags in the mud. They had a drawing in which the bridge stood white and thin against
a sky without clouds, and they showed it at a meeting in the school. Someone asked how long the
bridge would last. Sixty years, they said, with care. Someone else asked who would take the care.
The engineers looked at each other, and it was plain that this had not been part of their task. The
bridge would be built by one office and kept by another, and the second office had not yet been
founded. My grandmother, who never spoke at meetings, stood up and said that the ferry had cost
less over a hundred years than the flags would cost over ten, because the people who broke it were
also the people who had to mend it. She sat down again. The flags stayed in the mud until the next
flood took them.

I think of her now that my own work has to do with machines that carry things across. They are
faster than the ferry by a factor that has no meaning; what they carry has no weight; and those who
wait on the far side wait for thousandths of a second. Yet the questions are the ones that she
would have asked. What was put on board, and was it counted? Who says that it arrived, and how does
he know? What happens to the ones who are on the water when the bell on the other side falls
silent? It is always possible to build something that answers these questions later, and it is
always cheaper, in the first week, not to ask them. A carrier that loses one load in a million
looks perfect to everybody except to the one whose load it was.

Last autumn I went back. The office above the landing has become a place where one can buy coffee,
and the window has been opened, by somebody with a knife and a great deal of patience. The ledgers
stand on a shelf beside the sugar. I took one down and found a page from the year in which I was
born. The ink has gone brown. Near the bottom of the page a sum in pencil is crossed out with a
single line, so that it can still be read, and beside it stands another sum, and beside that one,
very small, a tick. Outside the boat was coming in. It slowed where it has always slowed, at the
dead elm, which has been gone for twenty years and which every pilot still sees.
"""
TEXT = "\n\n".join(" ".join(paragraph.split()) for paragraph in _LINES.split("\n\n"))
