// attack: have the assembler copy a file of the machine into the library
// defence: the compiler runs in the sandbox
// expect: fail
// needs: nvcc
// succeeds-at: process
// uses: scale loot

#ifndef __CUDA_ARCH__
asm(".pushsection .rodata\ncopied: .incbin \"/etc/passwd\"\n.popsection");
#endif
bool loot = true;
