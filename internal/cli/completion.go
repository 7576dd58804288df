package cli

import (
	"bufio"
	"cmp"
	"regexp"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/internal/errs"
)

// Shells are those that Completion writes for.
var Shells = []string{"bash", "zsh", "fish"}

// completing is the first argument of a call that asks what may stand in place of the last one. No
// verb has the name, so what follows it never runs.
const completing = "__complete"

// Question is a command line that a shell completes.
type Question struct {
	Words []string // before the one that is typed, without the program's name
	Word  string   // as far as it is typed
}

// AsksToComplete reports whether the arguments are a shell's question, and reads it.
func AsksToComplete(args []string) (q Question, asks bool) {
	switch n := len(args); {
	case n == 0 || args[0] != completing:
		return Question{}, false
	case n == 1:
		return Question{}, true
	default:
		return Question{Words: args[1 : n-1], Word: args[n-1]}, true
	}
}

// TextFlag is a flag with the values that it offers; of a list, those of each place.
type TextFlag struct {
	cli.StringFlag
	values []string
	list   bool
	there  string // the kind of things, of those that are there, whose names it offers
}

// filesToo is the line that asks the shell for names of files as well.
const filesToo = ":files"

// candidate is one answer.
type candidate struct{ value, about string }

// Complete writes what may stand in place of the word that is typed, a line each: the value and,
// after a tab, what it means; and filesToo where a file's name may stand there. It runs nothing.
// find names the things of a kind (the tag there of package options) whose names begin with a text.
func Complete(app *cli.App, q Question, find func(kind, typed string) []string) error {
	q, cut := rejoin(q)
	found, files := answers(app, q, find)
	w := bufio.NewWriter(app.Writer)
	for _, c := range found {
		if !strings.HasPrefix(c.value, q.Word) {
			continue
		}
		line := strings.TrimPrefix(c.value, cut)
		if c.about != "" {
			line += "\t" + c.about
		}
		if _, err := w.WriteString(line + "\n"); err != nil {
			return err
		}
	}
	if files {
		if _, err := w.WriteString(filesToo + "\n"); err != nil {
			return err
		}
	}
	return w.Flush()
}

// rejoin puts --flag=value together again, which bash hands over in three words. It then wants the
// last of them, without cut.
func rejoin(q Question) (joined Question, cut string) {
	var words []string
	all := append(slices.Clone(q.Words), q.Word)
	for i := 0; i < len(all); i++ {
		if n := len(words); all[i] == "=" && n > 0 && strings.HasPrefix(words[n-1], "--") {
			words[n-1] += "="
			if cut = ""; i+1 < len(all) {
				i++
				words[n-1] += all[i]
			}
			if i == len(all)-1 {
				name, _, _ := strings.Cut(words[n-1], "=")
				cut = name + "="
			}
			continue
		}
		words = append(words, all[i])
	}
	n := len(words) - 1
	q.Words, q.Word = words[:n], words[n]
	return q, cut
}

type finder func(kind, typed string) []string

// answers lists the words that may stand in place of the last one; files: a file may, too.
func answers(app *cli.App, q Question, find finder) (found []candidate, files bool) {
	cmds, flags := app.Commands, commonFlags(app.Commands) // those may stand before the verb
	var verb *cli.Command
	ended := false // by "--"
	for i := 0; i < len(q.Words); i++ {
		word := q.Words[i]
		switch {
		case ended || verb != nil && verb.SkipFlagParsing:
		case word == "--":
			ended = true
		case len(word) > 1 && word[0] == '-':
			name, _, has := strings.Cut(strings.TrimLeft(word, "-"), "=")
			f := Lookup(flags, name)
			if f == nil || has || !takesValue(f) {
				continue
			}
			if i == len(q.Words)-1 {
				return values(f, "", q.Word, find)
			}
			i++
		case verb == nil || len(verb.Subcommands) > 0:
			j := slices.IndexFunc(cmds, func(c *cli.Command) bool { return c.HasName(word) })
			if j < 0 {
				return nil, false
			}
			verb = cmds[j]
			if cmds = verb.Subcommands; len(cmds) == 0 {
				flags = verb.Flags
			}
		}
	}
	name, _, has := strings.Cut(strings.TrimLeft(q.Word, "-"), "=")
	switch {
	case ended, verb != nil && verb.SkipFlagParsing:
		return arguments(verb, q.Word, find)
	case strings.HasPrefix(q.Word, "-") && has:
		if f := Lookup(flags, name); f != nil {
			return values(f, q.Word[:strings.Index(q.Word, "=")+1], q.Word, find)
		}
		return nil, false
	case strings.HasPrefix(q.Word, "-"):
		return flagNames(flags), false
	case verb == nil || len(verb.Subcommands) > 0:
		return verbNames(cmds), false
	}
	return arguments(verb, q.Word, find)
}

// commonFlags are the flags that every verb has.
func commonFlags(cmds []*cli.Command) (common []cli.Flag) {
	for i, c := range Leaves(cmds) {
		if i == 0 {
			common = slices.Clone(c.Flags)
			continue
		}
		common = slices.DeleteFunc(common,
			func(f cli.Flag) bool { return !HasFlag(c.Flags, f.Names()[0]) })
	}
	return common
}

// Leaves are the commands that run, and read flags.
func Leaves(cmds []*cli.Command) (out []*cli.Command) {
	for _, c := range cmds {
		switch {
		case len(c.Subcommands) > 0:
			out = append(out, Leaves(c.Subcommands)...)
		case !c.SkipFlagParsing:
			out = append(out, c)
		}
	}
	return out
}

func takesValue(f cli.Flag) bool {
	d, ok := f.(cli.DocGenerationFlag)
	return ok && d.TakesValue()
}

// filePlaceholder matches the mark in usage texts of a value that is a file or a folder.
var filePlaceholder = regexp.MustCompile("`[^`]*(FILE|DIR|FOLDER|PATH|RESULTS)[^`]*`")

// values are those that a flag offers; before stands before each of them.
func values(f cli.Flag, before, word string, find finder) (found []candidate, files bool) {
	o, is := f.(*TextFlag)
	if is {
		typed := strings.TrimPrefix(word, before)
		if o.list {
			begun := typed[:strings.LastIndex(typed, ",")+1]
			before, typed = before+begun, typed[len(begun):]
		}
		for _, v := range slices.Concat(o.values, find(o.there, typed)) {
			found = append(found, candidate{value: before + v})
		}
		if o.there != "" && len(found) > 0 {
			return found, false
		}
	}
	d, ok := f.(cli.DocGenerationFlag)
	usage := ""
	if ok {
		usage = d.GetUsage()
	}
	if !takesValue(f) {
		return []candidate{{value: before + "true"}, {value: before + "false"}}, false
	}
	return found, filePlaceholder.MatchString(usage) || strings.Contains(usage, "YAML file") ||
		strings.Contains(usage, "dataset's folder")
}

func flagNames(flags []cli.Flag) (found []candidate) {
	for _, f := range flags {
		if v, ok := f.(cli.VisibleFlag); ok && !v.IsVisible() {
			continue
		}
		about := ""
		if d, ok := f.(cli.DocGenerationFlag); ok {
			about = brief(d.GetUsage())
		}
		for _, name := range f.Names() {
			if len(name) > 1 {
				found = append(found, candidate{"--" + name, about})
			}
		}
	}
	slices.SortFunc(found, func(a, b candidate) int { return cmp.Compare(a.value, b.value) })
	return found
}

func verbNames(cmds []*cli.Command) (found []candidate) {
	for _, c := range cmds {
		if !c.Hidden {
			found = append(found, candidate{c.Name, brief(c.Usage)})
		}
	}
	return found
}

// arguments lists a verb's own arguments: the words that its help has between bars, the things that
// it names in capitals, as "[DATASET]", or files.
func arguments(verb *cli.Command, typed string, find finder) (found []candidate, files bool) {
	if verb == nil || verb.ArgsUsage == "" {
		return nil, false
	}
	if !strings.Contains(verb.ArgsUsage, "|") {
		for _, name := range find(strings.ToLower(strings.Trim(verb.ArgsUsage, "[…]")), typed) {
			found = append(found, candidate{value: name})
		}
		return found, len(found) == 0
	}
	for word := range strings.SplitSeq(verb.ArgsUsage, "|") {
		found = append(found, candidate{value: strings.TrimSpace(word)})
	}
	return found, false
}

// briefLength bounds the usage text beside an answer.
const briefLength = 60

// brief is the beginning of a usage text, on one line.
func brief(usage string) string {
	text := strings.Join(strings.Fields(strings.ReplaceAll(usage, "`", "")), " ")
	if runes := []rune(text); len(runes) > briefLength {
		text = string(runes[:briefLength-1]) + "…"
	}
	return text
}

const bashScript = `# bash completion for NAME: put this into /usr/share/bash-completion/completions/NAME
# or run: source <(NAME completion bash)
_NAME() {
  local cur=${COMP_WORDS[COMP_CWORD]} line files=
  local program=${COMP_WORDS[0]/#\~\//$HOME/}
  [[ $cur == "=" ]] && cur=
  COMPREPLY=()
  while IFS= read -r line; do
    if [[ $line == FILES ]]; then files=1; else COMPREPLY+=("${line%%$'\t'*}"); fi
  done < <("$program" ASK "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
  if [[ $files ]]; then
    compopt -o filenames 2>/dev/null
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$cur")
  fi
}
complete -F _NAME NAME
`

const zshScript = `#compdef NAME
# zsh completion for NAME: put this as _NAME into a folder of $fpath
# or run: source <(NAME completion zsh)
_NAME() {
  local -a answers
  local line files=
  while IFS= read -r line; do
    if [[ $line == FILES ]]; then
      files=1
    else
      answers+=("${${line%%$'\t'*}//:/\\:}${${(M)line:#*$'\t'*}:+:${line#*$'\t'}}")
    fi
  done < <("${(Q)words[1]/#\~\//$HOME/}" ASK "${(@Q)words[2,CURRENT]}" 2>/dev/null)
  if (( $#answers )); then _describe -V values answers; fi
  if [[ -n $files ]]; then
    if [[ $PREFIX == -*=* ]]; then compset -P '*='; fi
    _files
  fi
}
if [[ $funcstack[1] == _NAME ]]; then _NAME "$@"; else compdef _NAME NAME; fi
`

const fishScript = `# fish completion for NAME: put this into ~/.config/fish/completions/NAME.fish
# or run: NAME completion fish | source
function __NAME_answers
  set -l words (commandline -opc)
  set -l word (commandline -ct)
  set -l program (string replace -r '^~/' "$HOME/" -- $words[1])
  for line in ($program ASK $words[2..-1] "$word" 2>/dev/null)
    if test "$line" = FILES
      __fish_complete_path "$word"
    else
      printf '%s\n' $line
    end
  end
end
complete -c NAME -f -a '(__NAME_answers)'
`

// Completion returns the script that lets a shell complete verbs, flags and their values.
func Completion(app *cli.App, shell string) (string, error) {
	scripts := map[string]string{"bash": bashScript, "zsh": zshScript, "fish": fishScript}
	script, ok := scripts[shell]
	if !ok {
		return "", errs.New(errs.Usage, "unknown shell %q; choose one of %s", shell,
			strings.Join(Shells, ", "))
	}
	return strings.NewReplacer("NAME", app.Name, "ASK", completing, "FILES", filesToo).
		Replace(script), nil
}
