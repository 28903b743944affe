/* Each prints the worst errors it saw and returns how many were beyond their bounds. */
int test_operator(void);
int test_model_step(void);
