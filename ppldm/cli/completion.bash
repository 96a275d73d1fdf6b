_ppldm() {
    local IFS=$'\n'
    COMPREPLY=($(ppldm completion next "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _ppldm ppldm
