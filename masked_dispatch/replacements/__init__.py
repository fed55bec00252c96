"""What this library replaces in torch, for the whole process.

torch calls a kernel of ours for each operator with a masked tensor; plain tensors never get there. Some of torch is no
operator: functions written in Python whose lines mean something else when each is masked by itself, methods of process
groups, and parts of the compiler. Of these, what table.py lists is replaced, by replacing.py and nowhere else. A call
that concerns no masked tensor goes to torch's own, with the same arguments.

table.py      each replacement: its names, when it is made, and what goes wrong without it
replacing.py  how one is made, and the switch
"""
