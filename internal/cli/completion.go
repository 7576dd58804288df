package cli

import (
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/internal/errs"
)

// Shells are those that Completion writes for.
var Shells = []string{"bash", "zsh", "fish"}

// completing is the last argument that the scripts of Completion add to ask for what may follow;
// urfave/cli answers it.
const completing = "--generate-bash-completion"

// Completing tells whether a shell asks what may follow the arguments before the last.
func Completing(args []string) bool {
	return len(args) > 0 && args[len(args)-1] == completing && !slices.Contains(args, "--")
}

const bashScript = `# bash completion for NAME: put this into /usr/share/bash-completion/completions/NAME
# or run: source <(NAME completion bash)
_NAME() {
  local cur=${COMP_WORDS[COMP_CWORD]} ask=("${COMP_WORDS[@]:0:COMP_CWORD}")
  [[ $cur == -* ]] && ask+=("$cur")
  mapfile -t COMPREPLY < <(compgen -W "$("${ask[@]}" ASK 2>/dev/null)" -- "$cur")
}
complete -o bashdefault -o default -F _NAME NAME
`

const zshScript = `#compdef NAME
# zsh completion for NAME: put this as _NAME into a folder of $fpath
# or run: source <(NAME completion zsh)
_NAME() {
  local -a opts ask
  ask=("${(@)words[1,CURRENT-1]}")
  [[ $words[CURRENT] == -* ]] && ask+=("$words[CURRENT]")
  opts=("${(@f)$(_CLI_ZSH_AUTOCOMPLETE_HACK=1 "${ask[@]}" ASK 2>/dev/null)}")
  if [[ -n $opts[1] ]]; then _describe values opts; else _files; fi
}
if [[ $funcstack[1] == _NAME ]]; then _NAME "$@"; else compdef _NAME NAME; fi
`

// Completion returns the script that lets a shell complete verbs and flags of the app.
func Completion(app *cli.App, shell string) (string, error) {
	fill := strings.NewReplacer("NAME", app.Name, "ASK", completing)
	switch shell {
	case "bash":
		return fill.Replace(bashScript), nil
	case "zsh":
		return fill.Replace(zshScript), nil
	case "fish":
		return app.ToFishCompletion()
	}
	return "", errs.New(errs.Usage, "unknown shell %q; choose one of %s", shell,
		strings.Join(Shells, ", "))
}
