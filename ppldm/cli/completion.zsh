#compdef ppldm
_ppldm() {
    local -a found
    found=(${(f)"$(ppldm completion next "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then compadd -- $found; else _files; fi
}
compdef _ppldm ppldm
