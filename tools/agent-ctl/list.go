package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/protocols/program"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/tools/agent-ctl/message"
)

func newListCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "list [METHOD …]",
		Short: "List the methods with their fields and types",
		Long: `list shows each method with the fields of its request and its response. For named methods
it also shows the messages inside them.`,
		Example: `  agent-ctl list
  agent-ctl list CreateContainer`,
		ValidArgsFunction: completeMethods,
		RunE: func(cmd *cobra.Command, names []string) error {
			methods, err := methodsNamed(names)
			if err != nil {
				return program.Usage(err)
			}
			return list(cmd.OutOrStdout(), methods, len(names) > 0)
		},
	}
}

// methodsNamed returns the methods with these names, or all methods if names is empty.
func methodsNamed(names []string) ([]service.MethodDesc, error) {
	if len(names) == 0 {
		return allMethods(), nil
	}
	var methods []service.MethodDesc
	for _, name := range names {
		m, err := findMethod(name)
		if err != nil {
			return nil, err
		}
		methods = append(methods, m)
	}
	return methods, nil
}

func list(out io.Writer, methods []service.MethodDesc, deep bool) error {
	table := output.Table(out)
	for i, m := range methods {
		if i > 0 {
			fmt.Fprintln(table)
		}
		fmt.Fprintf(table, "%s (%s): %s\n", m.Method, m.Service, about(m.Method))
		types := message.Describe(m.NewRequest(), m.NewResponse())
		describe(table, "takes ", types[0])
		answers := "answers "
		if m.Streams {
			answers = "answers a stream of "
		}
		describe(table, answers, types[1])
		if deep {
			for _, t := range types[2:] {
				describe(table, "", t)
			}
		}
	}
	return table.Flush()
}

func describe(out io.Writer, role string, t message.Type) {
	fmt.Fprintf(out, "  %s%s\n", role, t.Name)
	for _, f := range t.Fields {
		fmt.Fprintf(out, "    %s\t%s\n", f.Name, f.Type)
	}
}
