function __ppldm_next
    set -l typed (commandline -opc) (commandline -ct)
    set -l found (ppldm completion next $typed[2..-1] 2>/dev/null)
    if set -q found[1]
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c ppldm -f -a '(__ppldm_next)'
