"""The exit codes of `trapline`, beside 0 for success."""

#: The program itself failed: a full disk, too little memory, a broken file.
FAILURE = 1
#: The command line asks for something that does not exist or makes no sense.
USAGE = 2
#: A program, package, permission or isolation level that is needed is missing.
MISSING = 3
#: A check does not hold: a contradiction, a finding, a changed bundle.
NOT_HELD = 4
#: The command finished, but some cells were not measured or not solved.
INCOMPLETE = 5
INTERRUPTED = 130
#: Whoever read the output has left; as a shell counts a program that SIGPIPE ended.
PIPE_CLOSED = 141
