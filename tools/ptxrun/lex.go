package ptxrun

import "fmt"

// token is a word, a number, a string with its quotes, or one character of punctuation.
type token struct {
	text string
	line int
}

// lexer walks over PTX text. Comments and white space are between tokens.
type lexer struct {
	src  []byte
	at   int
	line int
}

func wordStart(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' ||
		c == '$' || c == '%' || c == '.'
}

// next returns the next token, with an empty text at the end.
func (l *lexer) next() (token, error) {
	for l.at < len(l.src) {
		c := l.src[l.at]
		switch {
		case c == '\n':
			l.line++
			l.at++
		case c == ' ' || c == '\t' || c == '\r':
			l.at++
		case c == '/' && l.at+1 < len(l.src) && l.src[l.at+1] == '/':
			for l.at < len(l.src) && l.src[l.at] != '\n' {
				l.at++
			}
		case c == '/' && l.at+1 < len(l.src) && l.src[l.at+1] == '*':
			begin := l.line
			l.at += 2
			for ; ; l.at++ {
				if l.at+1 >= len(l.src) {
					return token{}, fmt.Errorf("ptx line %d: comment does not end", begin)
				}
				if l.src[l.at] == '*' && l.src[l.at+1] == '/' {
					break
				}
				if l.src[l.at] == '\n' {
					l.line++
				}
			}
			l.at += 2
		default:
			return l.take()
		}
	}
	return token{line: l.line}, nil
}

func (l *lexer) take() (token, error) {
	begin := l.at
	c := l.src[l.at]
	l.at++
	switch {
	case c == '"':
		for l.at < len(l.src) && l.src[l.at] != '"' {
			if l.src[l.at] == '\n' {
				return token{}, fmt.Errorf("ptx line %d: string does not end", l.line)
			}
			l.at++
		}
		if l.at == len(l.src) {
			return token{}, fmt.Errorf("ptx line %d: string does not end", l.line)
		}
		l.at++
	case wordStart(c):
		for l.at < len(l.src) {
			if l.src[l.at] == ':' && l.at+2 < len(l.src) && l.src[l.at+1] == ':' &&
				wordStart(l.src[l.at+2]) { // ld.global.L1::no_allocate
				l.at += 2
			}
			if !wordStart(l.src[l.at]) {
				break
			}
			l.at++
		}
	case c < ' ' || c > '~':
		return token{}, fmt.Errorf("ptx line %d: character %#02x has no place here", l.line, c)
	}
	return token{string(l.src[begin:l.at]), l.line}, nil
}
