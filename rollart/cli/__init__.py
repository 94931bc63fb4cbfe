"""The command line: `commands` declares every command with its options and help, and names the function in another
module that runs it."""
