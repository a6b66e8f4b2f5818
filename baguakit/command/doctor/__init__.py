"""The subcommand `doctor`: it looks at the machine (`machine`) and at optional packages (`extras`), in `finding`s."""
