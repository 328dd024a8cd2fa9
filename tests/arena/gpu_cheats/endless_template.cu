// attack: keep the compiler busy for ever
// defence: compiling has a deadline
// expect: fail
// needs: nvcc
// slow: yes
// succeeds-without: deadline
// uses: scale loot

template <long A, long B> struct Tree {
    static constexpr long value = Tree<A - 1, 2 * B>::value + Tree<A - 1, 2 * B + 1>::value;
};
template <long B> struct Tree<0, B> { static constexpr long value = B; };
bool loot = Tree<40, 1>::value > 0;
