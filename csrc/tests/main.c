/* Runs the tests of the C interface with each instruction set of this machine: tools/safety.py builds and runs it. */
#include <stdio.h>
#include <string.h>

#include "../linattn.h"
#include "tests.h"

int main(void) {
    char names[64];
    int failures = 0;
    strcpy(names, linattn_available());
    for (char* name = strtok(names, " "); name; name = strtok(NULL, " ")) {
        if (linattn_choose(name) != 0) return 2;
        printf("%s\n", linattn_isa());
        failures += test_operator() + test_model_step();
    }
    return failures != 0;
}
