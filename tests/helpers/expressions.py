"""Random expressions of `--where`, for hypothesis."""

from hypothesis import strategies as st

from ppldm.data.select.expression import All, Any, Compare, Field, Literal, Member, Not


def make_expressions(names, ordered, equal, max_leaves):
    """Expressions over fields of these names; `ordered`: strategy of the values that < and the like may meet, `equal`:
    of those that == and `in` may."""
    fields, ordered, equal = st.sampled_from(names).map(Field), ordered.map(Literal), equal.map(Literal)
    comparisons = (
        st.builds(Compare, fields, st.sampled_from(["==", "!="]), equal | fields)
        | st.builds(Compare, fields, st.sampled_from(["<", "<=", ">", ">="]), ordered | fields)
        | st.builds(Compare, ordered, st.sampled_from(["<", ">="]), fields)
        | st.builds(Member, fields, st.lists(equal, min_size=1, max_size=4).map(tuple))
    )

    def terms(child):
        return st.lists(child, min_size=2, max_size=3).map(tuple)

    return st.recursive(
        comparisons,
        lambda child: st.builds(Not, child) | st.builds(All, terms(child)) | st.builds(Any, terms(child)),
        max_leaves=max_leaves,
    )
