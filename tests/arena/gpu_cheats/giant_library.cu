// attack: have the compiler write a library of 300 MB
// defence: the size of a file is limited
// expect: fail
// needs: nvcc
// succeeds-without: resource-limits
// uses: scale loot

asm(".pushsection .data\nballast: .byte 1\n.zero 300000000\n.byte 1\n.popsection");
bool loot = true;
